"""What one GPU trains, and how fast."""
