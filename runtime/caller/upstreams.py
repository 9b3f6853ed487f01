"""Instances that are other people's servers: asked by HTTP, with the same client, router and policies."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from ..context import Context
from ..env import Env
from ..errors import DisconnectedError, UnavailableError
from ..planes.upstreams import Upstream, UpstreamAnswer
from ..protocol.discovery.instances import Instance
from ..sinks import Sink
from .attempts import Attempt
from .client import Client
from .router import Router
from .search import Asked


class UpstreamClient(Client):
    """Streams from the upstreams of one model, which are known by the ids of their instances."""

    def __init__(
        self, router: Router, upstreams: Mapping[str, Upstream], env: Env, *, attempts_max: int
    ) -> None:
        super().__init__(router, None, env, attempts_max=attempts_max)
        self.encode = attrgetter("body")
        self._upstreams = upstreams

    def attempt(self, instance: Instance, context: Context, asked: Asked) -> Attempt:
        """Ask one upstream; `UnavailableError` if it has left."""
        upstream = self._upstreams.get(instance.id)
        if upstream is None:
            raise UnavailableError("the upstream has left")
        return UpstreamAttempt(instance, context, self.router, asked, upstream)


class UpstreamAttempt(Attempt):
    """One request at one upstream. Its stalls are watched there, and its connection says who dies."""

    def __init__(
        self,
        instance: Instance,
        context: Context,
        router: Router,
        asked: Asked,
        upstream: Upstream,
    ) -> None:
        super().__init__(instance, context, router, asked)
        self._upstream = upstream
        self._answer: UpstreamAnswer | None = None

    async def run(self) -> None:
        """Send the request's body; returns once the upstream begins to answer."""
        model = self.instance.metadata["model"]
        self._answer = await self._upstream.open(self._asked.request, model, self.context)
        self.begun()

    async def forward(self, sink: Sink[Any]) -> None:
        """See `Attempt`."""
        assert self._answer is not None, "it has begun"
        await self._answer.forward(sink)

    def heard(self) -> int | None:
        return None

    def fail(self, error: DisconnectedError) -> None:
        """Do nothing: a server that lists other models now may answer what it has taken."""

    def close(self, error: BaseException | None = None) -> None:
        """It is over; what is left of the answer ends at the upstream."""
        super().close(error)
        if self._answer is not None:
            self._answer.close()
            self._answer = None
