"""What speaks HTTP for a process, on either side: the edge knows nothing of sockets and TLS.

`transports.http` listens, `transports.openai` asks; `transports.assembly` hands both to a process.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeAlias

import msgspec
import trio

from ..config.http import HttpConfig
from ..config.upstream import UpstreamConfig
from ..errors import RemoteProtocolError
from ..metrics.metrics import Metrics
from ..planes.upstreams import Upstream
from ..protocol.undecodable import UNDECODABLE
from .exchanges import Handler

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Handlers: TypeAlias = Mapping[tuple[bytes, bytes], Handler]
"""By method and path, exactly."""
NO_HANDLERS: Final[Handlers] = MappingProxyType({})
BODY_BYTES_MAX: Final = 8 << 20


class Fetch(Protocol):
    """Asks another process of ours by HTTP."""

    async def __call__(
        self, url: str, *, timeout_s: float = 3.0, bytes_max: int = BODY_BYTES_MAX, key: str = ""
    ) -> tuple[int, bytes]:
        """GET a URL, with a client's `key` if there is one: status and body.

        Raises `ConfigError` for a URL that is none, `ConnectError` if there is no whole answer in
        time, `OverloadedError` for a longer body, `DisconnectedError` and `RemoteProtocolError`.
        """
        ...


async def fetch_json(
    fetch: Fetch, url: str, *, timeout_s: float = 3.0, bytes_max: int = BODY_BYTES_MAX
) -> Any:
    """GET a URL that answers with JSON, whatever its status. Raises as `fetch` does."""
    _, body = await fetch(url, timeout_s=timeout_s, bytes_max=bytes_max)
    try:
        return msgspec.json.decode(body)
    except UNDECODABLE as error:
        raise RemoteProtocolError(f"{url} did not answer with JSON") from error


class HttpServer(Protocol):
    """One listener and its connections; serves once."""

    async def serve(self, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen and serve; reports the bound port when connections are accepted.

        Returns soon after `close()`, whatever the clients do. Cancelled, it leaves no connection
        either. Raises `ConfigError` if it cannot listen.
        """
        ...

    def retire(self) -> None:
        """Have clients come again on other connections: each ends with its next answer, which says so.

        New ones are accepted, for one request each.
        """
        ...

    def hand_over(self) -> None:
        """Accept no more on a port that others share (`reuse_port`): they have it. Who had connected is served."""
        ...

    async def close_idle(self) -> None:
        """Close the connections on which nothing is under way: another server may have their next request.

        A request that has arrived and was not read yet is under way, and begun when this returns.
        """
        ...

    def close(self) -> None:
        """Accept no more, close idle connections at once and the others after a short grace."""
        ...


class HttpTransport(Protocol):
    """Makes servers and asks them; `transports.assembly.http` has the one that there is."""

    def make_server(
        self,
        app: AsgiApp,
        config: HttpConfig,
        *,
        metrics: Metrics,
        rng: random.Random,
        handlers: Handlers = NO_HANDLERS,
    ) -> HttpServer:
        """A server of `app`; `handlers` answer their method and path instead.

        Raises `ConfigError` for files of `config.tls` that cannot be used.
        """
        ...

    def check_files(self, config: HttpConfig) -> None:
        """Read the files that a server of `config` will; `ConfigError` says what is wrong."""
        ...

    @property
    def fetch(self) -> Fetch:
        """How other processes are asked."""
        ...

    def open_upstream(
        self, url: str, section: UpstreamConfig
    ) -> AbstractAsyncContextManager[Upstream]:
        """Another server of OpenAI's API, watched while open. Raises `ConfigError`."""
        ...
