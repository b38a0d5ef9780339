"""From what a user names as data to endless, shuffled, resumable batches.

sources → texts, rows, chats → shards (tokenized once) → token_store → dataset (packed rows) → loader.
"""
