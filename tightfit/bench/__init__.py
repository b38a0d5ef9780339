"""Measuring operations beside their peers, against the limits of the machine they run on."""
