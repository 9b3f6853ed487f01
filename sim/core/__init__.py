"""A world: virtual time, choices, hosts, tasks in a chosen order, and the trace of it all."""
