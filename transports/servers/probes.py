"""Whether a server on loopback is ready, and who leads its cluster: one question, one answer.

The questions are the plainest each server offers: HTTP for etcd, the greeting and the monitoring
port for NATS. No client library is needed, and none of the planes.
"""

from __future__ import annotations

import json
from typing import Any, Final

import trio

from .binaries import LOOPBACK

__all__ = ["etcd_is_ready", "etcd_leads", "nats_is_ready", "nats_meta_leader"]

PROBE_TIMEOUT_S: Final = 1.0
ANSWER_BYTES_MAX: Final = 65_536


async def etcd_is_ready(port: int) -> bool:
    """Whether the member serves, which in a cluster takes a leader."""
    return b'"true"' in await _exchange(port, _http(port, "GET /health"))


async def etcd_leads(port: int) -> bool:
    """Whether this member is the leader of its cluster, by its own account."""
    status = await _json(port, _http(port, "POST /v3/maintenance/status", body="{}"))
    leader = status.get("leader", "0")
    return bool(leader != "0" and leader == status.get("header", {}).get("member_id"))


async def nats_is_ready(port: int) -> bool:
    """Whether the server greets and has JetStream."""
    # The server speaks first; its INFO line says whether JetStream is up.
    return b'"jetstream":true' in await _exchange(port, b"")


async def nats_meta_leader(monitor_port: int) -> str:
    """The name of the server that leads JetStream in this server's eyes; empty if none does."""
    status = await _json(monitor_port, _http(monitor_port, "GET /jsz"))
    return str(status.get("meta_cluster", {}).get("leader", ""))


def _http(port: int, line: str, *, body: str = "") -> bytes:
    head = f"{line} HTTP/1.1\r\nHost: {LOOPBACK}:{port}\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


async def _json(port: int, request: bytes) -> dict[str, Any]:
    """The body of the answer; empty if there is none or it is no object."""
    _, _, body = (await _exchange(port, request)).partition(b"\r\n\r\n")
    # A body in chunks has their sizes round it.
    start, end = body.find(b"{"), body.rfind(b"}")
    try:
        answer = json.loads(body[start : end + 1])
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


async def _exchange(port: int, request: bytes) -> bytes:
    """What a server on loopback answers within a second; nothing if it does not."""
    answer = b""
    with trio.move_on_after(PROBE_TIMEOUT_S):
        try:
            async with await trio.open_tcp_stream(LOOPBACK, port) as stream:
                if request:
                    await stream.send_all(request)
                while len(answer) < ANSWER_BYTES_MAX and (part := await stream.receive_some(8192)):
                    answer += part
                    if not request:
                        break
        except (OSError, trio.BrokenResourceError):
            pass
    return answer
