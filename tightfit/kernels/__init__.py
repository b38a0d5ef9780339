"""One file per operation: implementations side by side with their eager reference."""
