"""Who computes what in the next step, and in which blocks of the cache."""
