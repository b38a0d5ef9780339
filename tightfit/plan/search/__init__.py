"""The search: layouts and levers of a workload on a machine, which of them fit, and the fastest of those."""
