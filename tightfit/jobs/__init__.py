"""The job file: what the user wants, validated before anything starts."""
