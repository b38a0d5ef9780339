"""The memory ledger, and the three sources that fill it: formulas, simulation, measurement."""
