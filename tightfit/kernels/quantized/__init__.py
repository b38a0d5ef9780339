"""Products with weights in codes of 2 to 8 bits, and the order in which kernels read the codes."""
