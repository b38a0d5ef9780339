"""The memory truth table: what is predicted for a training step, and what it took."""
