"""Checks before a run: a rehearsal on fake tensors, a few measured steps, N ranks against one process."""
