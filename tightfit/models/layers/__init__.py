"""The layers of the decoder, in plain PyTorch."""
