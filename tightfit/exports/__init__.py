"""Plans and deployments as files of DeepSpeed, accelerate, torchrun, Slurm, Kubernetes, SkyPilot and vLLM."""
