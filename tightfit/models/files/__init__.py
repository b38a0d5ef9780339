"""Files of tensors: checksums, shards, and checkpoints in pieces."""
