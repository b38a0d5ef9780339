"""Hugging Face directories: config.json and safetensors, in and out, one table row per family."""
