"""What a run saves so that it can be resumed: a Hugging Face directory, or pieces written by all ranks."""
