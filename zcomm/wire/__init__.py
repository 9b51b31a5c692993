"""What the bytes are: one codec, one file, defined in numpy."""
