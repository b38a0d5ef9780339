"""Where a step's seconds come from, one file per cause; plan/cost.py adds them up."""
