"""Accept connections until cancelled, and survive running out of descriptors.

Upstream's accept loop spun hot on EMFILE; this one backs off from 5 ms to 1 s and logs at most
every 5 s.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import trio

__all__ = ["accept_connections"]

_log = logging.getLogger("trinamo.tcp")
_EXHAUSTED: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_BACKOFF_MIN_S: Final = 0.005
_BACKOFF_MAX_S: Final = 1.0
_LOG_EVERY_S: Final = 5.0


async def accept_connections(
    listener: trio.SocketListener,
    serve: Callable[[trio.SocketStream], Awaitable[None]],
    nursery: trio.Nursery,
    *,
    connections_max: int,
) -> None:
    """Start `serve(stream)` in `nursery` for every connection, at most `connections_max` at once.

    At the bound new connections wait in the kernel's backlog. `serve` owns the stream and must
    not raise.
    """
    limiter = trio.Semaphore(connections_max)
    backoff_s = _BACKOFF_MIN_S
    logged_at = float("-inf")

    async def serve_one(stream: trio.SocketStream) -> None:
        try:
            await serve(stream)
        finally:
            stream.socket.close()
            limiter.release()

    while True:
        await limiter.acquire()
        try:
            stream = await listener.accept()
        except OSError as error:
            limiter.release()
            if error.errno not in _EXHAUSTED:
                raise
            if trio.current_time() - logged_at >= _LOG_EVERY_S:
                logged_at = trio.current_time()
                _log.error("cannot accept a connection: %s; backing off", error.strerror)
            await trio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)
        except BaseException:
            limiter.release()
            raise
        else:
            backoff_s = _BACKOFF_MIN_S
            nursery.start_soon(serve_one, stream)
