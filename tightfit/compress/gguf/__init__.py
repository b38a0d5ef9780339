"""Compressing into GGUF files."""
