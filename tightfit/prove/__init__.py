"""A run before the run: a rehearsal on fake tensors, a few measured steps, and one rank compared with many."""
