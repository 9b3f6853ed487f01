"""The caller's end where the instances are upstreams: one request out, one answer in.

As `caller/client.py` for workers, with the same router, policies and inhibition.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from ..config.router import RouterConfig
from ..context import Context
from ..env import Env
from ..errors import (
    DisconnectedError,
    TrinamoError,
    UnavailableError,
)
from ..planes.upstreams import Upstream, UpstreamAnswer
from ..protocol.discovery.instances import Instance
from ..protocol.discovery.presence import InFlight
from ..protocol.kv.hints import RoutingHint
from ..protocol.openai.generate import Delta, GenerateRequest
from ..sinks import Sink
from .router import Router
from .search import ELSEWHERE, Among, Patience, Search
from .streams import Telling


class DirectClient:
    """Asks the upstreams of one model, which each calls `model`; `find` knows them by instance id."""

    def __init__(
        self,
        router: Router,
        env: Env,
        model: str,
        find: Callable[[str], Upstream | None],
        *,
        attempts_max: int,
    ) -> None:
        self.router, self.env = router, env
        self._model, self._find = model, find
        self._attempts_max = attempts_max

    def tune(self, section: RouterConfig) -> None:
        """Choose, and try elsewhere, as `section` says from now on."""
        self._attempts_max = section.attempts_max
        self.router.tune(section)

    def stream(
        self,
        request: GenerateRequest,
        item_type: type[Delta],
        *,
        context: Context,
        instance_id: str | None = None,
        among: Among = None,
        hint: RoutingHint | None = None,
        patience: Patience | None = None,
    ) -> DirectStream:
        """As `Client.stream`: an `async with` that yields once an upstream begins to answer."""
        del item_type
        return DirectStream(self, request, context, instance_id, among, hint, patience)

    async def open(self, stream: DirectStream) -> None:
        """Try upstreams, none twice, until one begins to answer. Raises the last one's error."""
        search = Search(
            self.router,
            stream.context,
            attempts_max=self._attempts_max,
            payload_bytes=stream.payload_bytes,
            instance_id=stream.named,
            among=stream.among,
            hint=stream.hint,
            patience=stream.patience,
        )
        while True:
            instance = await search.choose()
            try:
                await stream.attempt(instance, self._upstream(instance), self._model)
            except ELSEWHERE as error:
                search.fail(instance, error)
            else:
                self.router.restore(instance)
                return

    def _upstream(self, instance: Instance) -> Upstream:
        found = self._find(instance.id)
        if found is None:
            raise UnavailableError("the upstream has left")
        return found


class _Flight(InFlight):
    """One request at one upstream. Its stalls are watched there, and its connection says who dies."""

    __slots__ = ()

    def heard(self) -> int | None:
        return None

    def fail(self, error: DisconnectedError) -> None:
        """Do nothing: a server that lists other models now may answer what it has taken."""


class DirectStream:
    """One answer, while inside. Leaving ends the request at its upstream."""

    def __init__(
        self,
        client: DirectClient,
        request: GenerateRequest,
        context: Context,
        named: str | None,
        among: Among,
        hint: RoutingHint | None,
        patience: Patience | None,
    ) -> None:
        self.context, self.named, self.among, self.hint = context, named, among, hint
        self.patience = patience
        self.payload_bytes = len(request.body)
        self.cached_blocks: int | None = None
        self._client, self._request = client, request
        self._answer: UpstreamAnswer | None = None
        self._instance: Instance | None = None

    @property
    def instance(self) -> Instance:
        """The upstream that answers."""
        assert self._instance is not None, "used outside of its `async with`"
        return self._instance

    async def __aenter__(self) -> Self:
        await self._client.open(self)
        return self

    async def attempt(self, instance: Instance, upstream: Upstream, model: str) -> None:
        """Ask one upstream; counted as under way there until it fails, or this is left."""
        router = self._client.router
        flight = _Flight(is_waiting=True, payload_bytes=self.payload_bytes)
        self.cached_blocks = router.begin(instance, flight, self.hint)
        leg = self.context.trace.begin("attempt", instance=instance.id)
        try:
            self._answer = await upstream.open(self._request, model, self.context)
        except BaseException as error:
            self._close_answer()
            leg.leave(error)
            router.end(instance, flight)
            raise
        leg.mark("begun")
        flight.is_waiting = False
        self._instance, self._flight, self._leg = instance, flight, leg

    async def forward(self, sink: Sink[Delta]) -> None:
        """Hand every delta to `sink`; returns at the end, or raises what ended the answer."""
        assert self._answer is not None, "used outside of its `async with`"
        if self.hint is not None:
            router, flight = self._client.router, self._flight
            sink = Telling(sink, lambda: router.first_item(flight))
        try:
            await self._answer.forward(sink)
        except TrinamoError as error:
            self._client.router.fail(self.instance, error, self.context)
            raise

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close_answer()
        self._leg.leave(exc)
        self._client.router.end(self.instance, self._flight)

    def _close_answer(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = None
