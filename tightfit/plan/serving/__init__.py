"""Plans for serving a model: memory, speeds, and how many cards hold how many copies."""
