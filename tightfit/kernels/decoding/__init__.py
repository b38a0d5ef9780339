"""Steps of the server: attention over a paged cache, products for few tokens, and the choice of the next token."""
