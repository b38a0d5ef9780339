"""What makes one GPU hold more, applied to a decoder from outside."""
