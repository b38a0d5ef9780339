"""The training loop and what it stands on: data, objectives, optimizer, checkpoints."""
