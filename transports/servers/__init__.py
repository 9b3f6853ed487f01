"""Embedded servers: real etcd and NATS from their wheels, as supervised children.

For development, tests and one-machine clusters; production brings its own servers. Nothing here
speaks the servers' protocols: see `transports/etcd` and `transports/nats`. Read `process.py`
(one child that dies with its parent) next, then `embedded.py`.
"""

from __future__ import annotations

from .embedded import EmbeddedServer, open_etcd_server, open_nats_server

__all__ = [
    "EmbeddedServer",
    "open_etcd_server",
    "open_nats_server",
]
