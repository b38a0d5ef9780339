"""Public layouts of quantized weights in safetensors directories, one file each; `registry.py` knows them all."""
