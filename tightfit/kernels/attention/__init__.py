"""Attention in training and its positions: flash attention, parts of it, sinks, rope."""
