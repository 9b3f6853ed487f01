"""Which cluster a command is about, and who of it runs on this machine."""
