"""The mesh, and one file per way of splitting work over ranks."""
