"""Tables and pictures made from results."""
