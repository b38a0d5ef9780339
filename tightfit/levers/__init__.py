"""Levers lower the memory that a model takes on one GPU; they are applied to a decoder from outside."""
