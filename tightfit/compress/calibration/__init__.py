"""Calibration: its rows, and what is observed while they pass through a layer."""
