"""Whether a server is ready: one question, one answer.

The questions are the plainest each server offers: HTTP for etcd, the greeting for NATS. No client
library is needed, and none of the planes.
"""

from __future__ import annotations

from typing import Final

import trio

PROBE_TIMEOUT_S: Final = 1.0
# etcd's metrics are some hundred kilobytes.
ANSWER_BYTES_MAX: Final = 1 << 20


async def etcd_is_ready(address: str) -> bool:
    """Whether the server serves, which in a cluster takes a leader."""
    # HTTP/1.0, so that no answer comes in chunks.
    return b'"true"' in await ask(address, b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")


async def nats_is_ready(address: str) -> bool:
    """Whether the server greets and has JetStream."""
    # The server speaks first; its INFO line says whether JetStream is up.
    return b'"jetstream":true' in await ask(address, b"")


async def ask(address: str, request: bytes) -> bytes:
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
