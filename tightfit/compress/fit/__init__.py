"""`--fit`: bits by layer within a budget of bytes."""
