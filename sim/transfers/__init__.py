"""Hosts that move KV blocks: prefill hosts compute them, decode hosts need them.

Each host opens what a worker opens for its engine (`kv/transfer/engine.py`): a lease in the
simulated store and the offer under it, the watch of its peers, a chain of two backends, one-sided
memory that lands late (`services/memory/plane.py`) and the tcp plane on simulated sockets. So the
life of a block is attacked as the life of a request is in a cluster. `[transfers]` in a scenario
file asks for it.

Read in this order: `plan.py`, `process.py` (one host), `pull.py` and `push.py` (how a decode host
comes by its blocks), `stage.py` (all hosts of a run), `driver.py`, `audit.py` (I9), `adapters.py` (faults).
"""

from .plan import TransferPlan
from .stage import TransferStage

__all__ = ["TransferPlan", "TransferStage"]
