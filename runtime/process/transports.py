"""What a process is put together from: the planes that a `Transports` makes of a configuration, and HTTP.

`opening.py` opens them in order and owns what runs on them; `transports.assembly` has the real
`Transports`, the simulator another one. Nothing here runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from ..config.config import Config
from ..env import Env
from ..http.transport import HttpTransport
from ..planes import ControlPlane, EventPlane
from ..planes.transports import DataPlane, TransferChain
from ..traces.spans import SpanSink


class Transports(Protocol):
    """Makes concrete planes out of a configuration; `transports.assembly` has the real one."""

    @property
    def http(self) -> HttpTransport:
        """What speaks HTTP, on either side."""
        ...

    def open_control(self, config: Config, env: Env) -> AbstractAsyncContextManager[ControlPlane]:
        """The control plane; raises `ConfigError` or `ConnectError` with a sentence."""
        ...

    def open_events(self, config: Config, env: Env) -> AbstractAsyncContextManager[EventPlane]:
        """The event plane."""
        ...

    def open_data(
        self, config: Config, env: Env, events: EventPlane, *, serving: str | None
    ) -> AbstractAsyncContextManager[DataPlane]:
        """The data plane; `serving` is the instance id of a process that takes requests."""
        ...

    def open_spans(
        self, config: Config, env: Env, process: Mapping[str, str]
    ) -> AbstractAsyncContextManager[SpanSink]:
        """Where spans go, with `tracing.enabled`; `process` is what they say of where they are from.

        Raises `ConfigError` where that is not installed. Leaving it sends what waits, in its time.
        """
        ...

    def open_transfers(
        self, config: Config, env: Env
    ) -> AbstractAsyncContextManager[TransferChain]:
        """The transfer backends of `data_plane`; asked only where there is KV memory to move.

        Raises `ConfigError` for what cannot work as it is configured, such as a device that is
        not there. A backend whose library is missing is left out, and named in `missing`.
        """
        ...
