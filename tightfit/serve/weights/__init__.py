"""The kinds of matrices that a step multiplies by, joined where they have one input."""
