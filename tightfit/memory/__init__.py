"""Where the memory goes: the ledger, and the three sources that fill it."""
