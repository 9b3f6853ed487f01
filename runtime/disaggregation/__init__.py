"""Prefill and decode in different workers: what an operator may combine is in `options.py`."""
