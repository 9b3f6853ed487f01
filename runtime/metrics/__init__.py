"""What the processes count, and what `/metrics` shows of it."""
