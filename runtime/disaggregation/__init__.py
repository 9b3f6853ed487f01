"""Prefill and decode in different workers: what an operator may combine is in `options.py`."""

from __future__ import annotations

from .options import TRANSFER_BACKENDS, DisaggregationOptions, normalize

__all__ = ["TRANSFER_BACKENDS", "DisaggregationOptions", "normalize"]
