"""`trinamo doctor`: what is there, what is missing, and the command that mends it."""
