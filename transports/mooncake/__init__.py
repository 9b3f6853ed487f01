"""KV blocks over the Mooncake transfer engine, by RDMA or TCP (`mooncake_tcp`).

Start with `plane.py` (`open_mooncake_plane`), then `workers.py` (the threads that call the engine),
`engine.py` (the wrapper, and what an operator may set).

The engine listens on two ports of *all* interfaces, whatever it is told, and asks nobody who they
are: anyone who can connect may read and write registered memory. Use it in networks that are
closed to others. `docs/transfer_backends.md` says more.
"""
