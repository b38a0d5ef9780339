"""Quantized weights inside the decoder: how numbers are coded and packed, public file layouts, and loading them."""
