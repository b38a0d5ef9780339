"""Keys and values: the paged cache, attention over it, and the store in host memory."""
