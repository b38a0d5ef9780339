"""Serving: a paged key/value cache, continuous batching, sampling, and an OpenAI-compatible server on top of them."""
