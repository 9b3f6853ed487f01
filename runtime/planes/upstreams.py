"""Other people's servers of OpenAI's API: what a frontend sees of one that it asks itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import attrs
import trio

from ..context import Context
from ..protocol.openai.generate import Delta, GenerateRequest
from ..sinks import Sink


@attrs.frozen
class Load:
    """How busy a server says it is, whoever keeps it busy."""

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    """The fraction of its KV cache in use."""


class UpstreamView(Protocol):
    """What is known of one server, which is looked at again and again."""

    @property
    def is_healthy(self) -> bool:
        """Whether it answers; True until several looks in a row have failed."""
        ...

    @property
    def why(self) -> str:
        """What went wrong at the last look; empty: nothing."""
        ...

    @property
    def models(self) -> Mapping[str, int]:
        """What it serves, as it said last: the tokens of each model's context, 0 where it tells none."""
        ...

    @property
    def has_told(self) -> bool:
        """Whether it has ever said what it serves."""
        ...

    @property
    def load(self) -> Load | None:
        """None if it does not tell."""
        ...

    @property
    def looked(self) -> trio.Event:
        """Set once it was looked at."""
        ...

    @property
    def changed(self) -> trio.Event:
        """Set at the next change of health or models, and replaced by a new one."""
        ...


class UpstreamAnswer(Protocol):
    """The answer to one request: `forward` it once, then `close` it."""

    async def forward(self, sink: Sink[Delta]) -> None:
        """Hand its deltas to `sink`; returns at the complete end, else raises what ended it."""
        ...

    def close(self) -> None:
        """End the request at its server, unless it is over, and keep nothing. No checkpoint."""
        ...


class Upstream(Protocol):
    """One server, watched while it is open."""

    @property
    def url(self) -> str:
        """As it is told to people, without credentials."""
        ...

    @property
    def place(self) -> str:
        """Its host and port."""
        ...

    @property
    def view(self) -> UpstreamView:
        """Health, load and models."""
        ...

    async def open(self, request: GenerateRequest, model: str, context: Context) -> UpstreamAnswer:
        """Send the request's body, for the server's `model`; returns once it begins to answer.

        Raises `RequestError` for a body that cannot be sent, `TransportError`, `OverloadedError`,
        `UnavailableError` or `RemoteProtocolError` where another server may do it. Stopped, it
        returns an answer that is cancelled; safe to cancel.
        """
        ...
