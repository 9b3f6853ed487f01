"""Connections between a caller and a worker: frames, the two state machines, silence, proof of membership."""
