"""Training with products in fp8: codes, scales, and the layers that use them."""
