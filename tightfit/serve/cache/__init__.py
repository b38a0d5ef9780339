"""Keys and values: the paged cache, attention over it, and what is kept in the host."""
