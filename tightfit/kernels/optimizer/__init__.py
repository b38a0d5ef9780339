"""AdamW in all its formats, the norm of gradients, and stochastic rounding."""
