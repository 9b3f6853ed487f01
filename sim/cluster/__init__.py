"""A whole cluster in one world: real code, a host for each process."""
