"""What a run saves so that it can be resumed: a directory anybody can load, or pieces written by all ranks."""
