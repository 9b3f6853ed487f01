"""The simulated network, plus hosts that have run out of file descriptors.

`accept` on such a host fails with EMFILE and leaves the connection in the backlog, as Linux does.
"""

from __future__ import annotations

import errno
import os
import socket as stdlib
from typing import Any, Final

import trio
from typing_extensions import override

from ..net.network import Network
from ..net.sockets import SimSocket

SECRET: Final = b"the secret of a simulated cluster"
"""Of all its hosts: they are not loopback to each other."""


class ClusterNetwork(Network):
    """A `Network` with `exhausted`: the hosts on which accept fails for now."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.exhausted: set[str] = set()

    @override
    def socket(
        self, family: int = stdlib.AF_INET, type: int = stdlib.SOCK_STREAM, proto: int = 0
    ) -> SimSocket:
        made = super().socket(family, type, proto)
        made.__class__ = _Socket
        return made


class _Socket(SimSocket):
    @override
    async def accept(self) -> Any:
        network = self._stack
        assert isinstance(network, ClusterNetwork)
        if self._endpoint.host.name in network.exhausted:
            await trio.lowlevel.checkpoint()
            network.world.note("accept.failed")
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return await super().accept()
