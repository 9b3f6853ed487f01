"""What several planes are together: those of requests and responses, and the backends of transfers.

A `Transports` (`process/transports.py`) makes them of a configuration.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

import attrs

from ..config.keys import is_everywhere, is_loopback, url_of
from .events import EventPlane
from .requests import CallHome, RequestPlane, RequestServer, ResponsePlane
from .settlement import SettlementPlane
from .transfer import TransferPlane
from .upstreams import Upstream


@attrs.frozen(kw_only=True)
class DataPlane:
    """What carries requests and responses, both ends of each."""

    request_planes: Mapping[str, RequestPlane] = attrs.field(factory=dict)
    """By transport name, in order of preference."""
    request_servers: Sequence[RequestServer] = ()
    """Empty in a process that serves nothing."""
    response_plane: ResponsePlane | None = None
    """None in a process that asks no workers."""
    call_home: CallHome | None = None
    """None there, too."""
    home_address: str = ""
    """`host:port` at which workers call home, as peers are told; empty there, too."""
    upstreams: MutableMapping[str, Upstream] = attrs.field(factory=dict)
    """Other people's servers by instance id, which are asked where no workers are."""
    secret: bytes = attrs.field(default=b"", repr=False)
    """What peers prove to each other that they know; empty if nothing."""
    keep_certificate: Callable[[Any], Awaitable[None]] | None = None
    """Keeps what is shown to peers renewed, and tells the `Metrics` it is called with how long it is valid; None: nothing is."""
    told: EventPlane | None = None
    """Where processes tell of themselves by events, believed of members only; None: by the event plane as it is."""

    @property
    def addresses(self) -> dict[str, str]:
        """Where callers are told to send requests, by transport."""
        return {server.transport: server.address for server in self.request_servers}

    def advertised_url(self, url: str) -> str:
        """Under which URL others ask a server of this process that listens at `url`.

        One that binds every address is asked where peers reach the process. Empty: nobody can ask,
        as it is bound to loopback, and the peers are on other machines.
        """
        scheme, _, place = url.partition("://")
        bound, port = _split(place)
        peers, _ = _split(self.home_address)
        if is_everywhere(bound):
            return url_of(peers, port, scheme) if peers else ""
        is_alone = not peers or is_loopback(peers) or not is_loopback(bound)
        return url if is_alone else ""


def _split(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port


@attrs.frozen(kw_only=True)
class TransferChain:
    """The transfer backends of a process, in the order in which they are tried."""

    planes: Sequence[TransferPlane]
    """Those that are open."""
    order: Sequence[str]
    """The names of all that are configured, open or not."""
    missing: Mapping[str, str] = attrs.field(factory=dict)
    """Backends that are configured but cannot be used on this machine, and why, in a sentence."""
    settlement: SettlementPlane | None = None
    """Asks peers whether they have let go of our blocks; it is open longer than all of `planes`.
    None: nobody is asked, and we have no descriptor."""
