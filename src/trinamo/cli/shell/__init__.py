"""What a shell sees of the commands: their help pages, and what it completes."""
