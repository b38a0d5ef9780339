"""Other programs that do the same work, made comparable."""
