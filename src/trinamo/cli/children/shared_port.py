"""One HTTP port for several frontends on this machine, which the kernel spreads connections over.

Each listens for itself (SO_REUSEPORT). Whoever starts them chooses the port, and holds it for as
long as one of them may come back; a socket that does not listen gets no connections.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from trinamo.runtime.config.config import CLOSE_TIMEOUT_S, Config
from trinamo.runtime.errors import ConfigError

from ..options import Sources
from .child import Child

_ADVICE: Final = "--port, or 0 to let the system choose"


def check_port(host: str, port: int, advice: str = _ADVICE) -> None:
    """Raise `ConfigError` if the port is taken: better now than after everything has started."""
    if not port:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As the listener does it: a port whose last connections linger is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise _explain(error, host, port, advice) from error


@contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """The port, chosen now if it is 0, held while inside for processes of this user that share it.

    Raises `ConfigError` if it is taken, be it by somebody who would share it.
    """
    check_port(host, port)
    with ExitStack() as held:
        try:
            found = socket.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for address in dict.fromkeys(str(info[4][0]) for info in found):
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                holder = held.enter_context(socket.socket(family))
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                if family == socket.AF_INET6:
                    holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                # Connections that linger since one frontend had the port alone do not hold it; but
                # while no child listens nobody else is to have it for the same reason.
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                holder.bind((address, port))
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
                port = holder.getsockname()[1]
        except OSError as error:
            raise _explain(error, host, port, _ADVICE) from error
        yield port


def _explain(error: OSError, host: str, port: int, advice: str) -> ConfigError:
    return ConfigError(
        f"cannot listen on {host} port {port}: {error.strerror or error}; choose another"
        f" with {advice}"
    )


def sharing(sources: Sources, port: int) -> Sources:
    """What a frontend is told that shares `port`; each has a status port of its own."""
    return sources.with_overrides(http__port=port, http__reuse_port=True, http__status_port=0)


def frontend_grace_s(config: Config) -> float:
    """How long a frontend may take to end by itself."""
    http = config.http
    return http.lame_duck_s + http.drain_timeout_s + http.stop_grace_s + CLOSE_TIMEOUT_S


def status_url_of(child: Child) -> str:
    """Where this very child answers; empty before it has said so."""
    return str(child.facts.get("status_url") or child.facts.get("url") or "")
