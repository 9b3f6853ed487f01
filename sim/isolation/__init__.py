"""What a run may not touch, and what it sees instead."""
