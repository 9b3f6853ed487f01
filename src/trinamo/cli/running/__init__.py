"""Which cluster a command is about, and what its processes answer."""
