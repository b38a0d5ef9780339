"""Guesses at the next tokens, checked in one step."""
