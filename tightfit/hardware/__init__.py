"""What machines have: read from the machine itself, never by importing torch."""
