"""Scenarios: a cluster, its load, what breaks and when, what must hold; and how they are played."""
