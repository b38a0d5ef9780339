"""Gated activations and the MLP around them."""
