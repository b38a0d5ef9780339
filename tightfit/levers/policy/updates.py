"""How much of the weights AdamW updates at a time."""

BUCKET_BYTES = 256 * 2**20
"""Float32 copies of narrow gradients, made for torch's AdamW (train/optimizer), of which so many exist at a time."""
FACTORED_CHUNK_ELEMENTS = 2**22
"""Of a factored matrix, what is updated at a time (levers/optimizer_states.py): three float32 intermediates of so many
numbers, 48 MiB."""
