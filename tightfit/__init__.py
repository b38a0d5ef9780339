"""tightfit: train, shrink and serve large language models on the GPUs people actually have."""

__version__ = "0.1.0"
