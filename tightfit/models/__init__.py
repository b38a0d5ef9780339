"""Model shapes, one decoder for every family, and weights in and out."""
