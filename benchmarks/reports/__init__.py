"""Tables and pictures of README.md and docs/, made from the program and the results."""
