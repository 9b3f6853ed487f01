"""The processes of a benchmark: a worker or a client, of trinamo or of grpc.aio.

Run as `python bench/roles/roles.py ROLE [ADDRESS]` by `processes.py`: prints one JSON line when
ready, then answers one JSON line per command line on its standard input, and ends with it. Every
role encodes and decodes its items with the same msgpack codec, so only the RPC differs.
"""

from __future__ import annotations

import sys

import grpc_roles
import trinamo_roles

ROLES = {
    "trinamo-worker": trinamo_roles.worker,
    "trinamo-client": trinamo_roles.client,
    "grpc-worker": grpc_roles.worker,
    "grpc-client": grpc_roles.client,
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
