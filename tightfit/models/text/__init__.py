"""Tokenizers and chat templates: files of strangers, read and run within bounds."""
