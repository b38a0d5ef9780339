"""Methods that make fewer weights: pruning, narrower layers, lower rank."""
