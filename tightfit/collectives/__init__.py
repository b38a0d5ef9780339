"""Collectives as autograd functions, and sharded tensors. Knows no model and no layout."""
