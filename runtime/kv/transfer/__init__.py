"""KV blocks between processes: `docs/transfer.md` tells how one gets from A to B.

Start with `engine.py`, what an engine sees, which finds the others by `metadata.py`; `router.py`
moves blocks by `routes.py`, an attempt at a time; `leases.py` lends them, and keeps
them until nothing touches them, which a peer proves by `settlement.py`.
"""
