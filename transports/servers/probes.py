"""Whether a server is ready, and who leads its cluster: one question, one answer.

The questions are the plainest each server offers: HTTP for etcd, the greeting and the monitoring
port for NATS. No client library is needed, and none of the planes.
"""

from __future__ import annotations

import json
from typing import Any, Final

import trio

__all__ = ["etcd_is_ready", "etcd_leads", "nats_is_ready", "nats_meta_leader"]

PROBE_TIMEOUT_S: Final = 1.0
# etcd's metrics are some hundred kilobytes.
ANSWER_BYTES_MAX: Final = 1 << 20


async def etcd_is_ready(address: str) -> bool:
    """Whether the member serves, which in a cluster takes a leader."""
    return b'"true"' in await _exchange(address, _get("/health"))


async def etcd_leads(address: str) -> bool:
    """Whether this member is the leader of its cluster, by its own account."""
    return b"\netcd_server_is_leader 1\n" in await _exchange(address, _get("/metrics"))


async def nats_is_ready(address: str) -> bool:
    """Whether the server greets and has JetStream."""
    # The server speaks first; its INFO line says whether JetStream is up.
    return b'"jetstream":true' in await _exchange(address, b"")


async def nats_meta_leader(monitor_address: str) -> str:
    """The name of the server that leads JetStream in this server's eyes; empty if none does."""
    status = _object(await _exchange(monitor_address, _get("/jsz")))
    return str(status.get("meta_cluster", {}).get("leader", ""))


def _get(path: str) -> bytes:
    # HTTP/1.0, so that no answer comes in chunks.
    return f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode()


def _object(answer: bytes) -> dict[str, Any]:
    """The JSON body of the answer; empty if there is none or it is no object."""
    try:
        value = json.loads(answer.partition(b"\r\n\r\n")[2])
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


async def _exchange(address: str, request: bytes) -> bytes:
    """What the server at `host:port` or `unix:path` answers within a second; or nothing."""
    answer = b""
    with trio.move_on_after(PROBE_TIMEOUT_S):
        try:
            async with await _dial(address) as stream:
                if request:
                    await stream.send_all(request)
                while len(answer) < ANSWER_BYTES_MAX and (
                    part := await stream.receive_some(65_536)
                ):
                    answer += part
                    if not request:
                        break
        except (OSError, trio.BrokenResourceError):
            pass
    return answer


async def _dial(address: str) -> trio.SocketStream:
    if address.startswith("unix:"):
        return await trio.open_unix_socket(address.removeprefix("unix:"))
    host, _, port = address.rpartition(":")
    return await trio.open_tcp_stream(host, int(port))
