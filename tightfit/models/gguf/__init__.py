"""GGUF files, llama.cpp's format: read into the decoder, written for the families that `config.WRITTEN` lists."""
