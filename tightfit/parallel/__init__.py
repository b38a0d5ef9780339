"""The device mesh, and one file per kind of parallelism."""
