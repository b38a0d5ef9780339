"""What layouts and levers there are for a workload on a machine, which of them fit, and the fastest of those."""
