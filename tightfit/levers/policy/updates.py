"""How much of the weights AdamW updates at a time."""

BUCKET_BYTES = 256 * 2**20
"""The most bytes at a time of float32 copies of 16-bit gradients, made for torch's AdamW (train/optimizer)."""
FACTORED_CHUNK_ELEMENTS = 2**22
"""Elements of a matrix with factored moments updated at a time (levers/optimizer_states.py): three float32
intermediates of so many elements, 48 MiB."""
