"""Routed MLPs: grouped products of the experts' rows, and copies of rows."""
