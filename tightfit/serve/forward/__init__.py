"""The decoder's forward pass over a step."""
