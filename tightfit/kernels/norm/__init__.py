"""RMSNorm and LayerNorm, and the kernels behind both."""
