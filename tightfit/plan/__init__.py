"""Layouts, levers, costs, the search over them, and what a plan can be exported to."""
