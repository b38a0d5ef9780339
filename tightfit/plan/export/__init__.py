"""A plan in other programs' words: DeepSpeed, accelerate, torchrun, Slurm."""
