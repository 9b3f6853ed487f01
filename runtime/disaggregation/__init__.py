"""Disaggregated serving: a prompt is computed by one worker, and its answer goes on at another."""
