"""One file per operation: its kernels side by side with their eager reference."""
