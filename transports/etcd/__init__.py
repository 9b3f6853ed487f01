"""The control plane over etcd v3.

For discovery, leases and configuration; it starts no server (see `transports/servers`) and is no
general etcd client: only what `ControlPlane` needs. Start with `control.py`, which puts the parts
together; then `client.py` (unary calls and what may be repeated), `watching.py` and
`keeping.py` (the two streams; the books of the first are `watches.py`), `rpc.py` (what carries all of
them, and how they fail), `bridge.py` (gRPC's threads on one side, trio on the other).

`wire_pb2.py` and `wire_pb2.pyi` are generated from `wire.proto` and committed. To make them anew,
in this folder, with the `grpcio-tools` of the `dev` extra:

    python -m grpc_tools.protoc --proto_path=. --python_out=. --pyi_out=. wire.proto
"""

from __future__ import annotations

from .control import EtcdControlPlane, open_etcd

__all__ = ["EtcdControlPlane", "open_etcd"]
