"""What is played, and what came of it."""
