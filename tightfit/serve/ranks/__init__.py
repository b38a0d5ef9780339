"""One model over several ranks of one machine."""
