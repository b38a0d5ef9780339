"""From the data a user names to endless, shuffled, resumable batches.

sources → texts, rows, chats → shards (tokenized once) → token_store → dataset (packed rows) → loader.
"""
