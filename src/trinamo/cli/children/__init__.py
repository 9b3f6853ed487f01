"""Processes that a process of ours starts, listens to, starts again, and ends."""
