"""In-process planes: for unit tests, single-process use, and, behind messages, the simulator."""
