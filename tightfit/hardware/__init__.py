"""Accelerators, links and machines: catalogs, this machine, and calibrated efficiencies, without torch."""
