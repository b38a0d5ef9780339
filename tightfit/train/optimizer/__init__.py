"""AdamW with its master weights: on the GPU, inside backward, or with states on the host."""
