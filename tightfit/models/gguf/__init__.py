"""GGUF files, llama.cpp's format: reading any, writing what our decoder can be written as."""
