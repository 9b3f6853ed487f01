"""Whom one request is sent to, attempt after attempt, and the wait where nobody is there.

Each instance is tried once. One that was lost, in this search or by an earlier stream of the answer,
may be asked again once it is well: it is out of reach as long as its connection is, or while it is
inhibited. Decided synchronously in `_pick` and `fail`, awaited in `choose`; the attempts themselves
are `attempts.py`'s and `upstreams.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, TypeAlias

import attrs
import trio

from ..context import Context
from ..errors import (
    ConnectError,
    DisconnectedError,
    OverloadedError,
    RemoteProtocolError,
    TransportError,
    TrinamoError,
    UnavailableError,
)
from ..nurseries import forget_frames
from ..protocol.discovery.instances import Instance
from ..protocol.kv.names import RoutingHint
from .router import Router

ELSEWHERE: Final = (TransportError, RemoteProtocolError, OverloadedError, UnavailableError)
"""What may be tried on another instance; all else would fail there too, or must not run twice."""
LOOK_INTERVAL_S: Final = 0.25
"""How often those who wait look whether a lost instance is well again; who joins is seen at once."""
_SILENCES_MAX: Final = 2
_LOST: Final = (ConnectError, DisconnectedError)

Among: TypeAlias = Collection[str] | Callable[[], Collection[str] | None] | None
"""The ids to choose from, None for all; a callable is asked at each choice, for they change."""


@attrs.frozen
class Patience:
    """What a request may wait for, `router.wait_s` at most, where it finds nobody."""

    lost: Collection[str] = ()
    """The instances that streams of the same answer were lost with."""
    waits_for_room: bool = False
    """Also while every instance is full: its client has a part of the answer."""


def is_suspect(context: Context) -> bool:
    """Whether one worker after the other fell silent over this request: no third one is asked."""
    return context.silence_count >= _SILENCES_MAX


@attrs.define(eq=False)
class Asked:
    """One request, as its attempts see it."""

    request: Any
    payload: bytes
    """The request encoded, or its body where that is sent as it is; empty once its answer has begun."""
    decode: Callable[[bytes], Any] = bytes
    """Makes an item of what comes."""
    instance_id: str | None = None
    """The only one that is asked, if it is named."""
    among: Among = None
    hint: RoutingHint | None = None
    """What the policy `kv` is told of the prompt."""
    patience: Patience | None = None
    """Without it nobody waits."""
    takes_input: bool = False
    accepted: Callable[[], None] | None = None
    """Called, without waiting, each time that a worker has taken it, before it has anything to say."""


class Search:
    """The instances that one request tries, `attempts_max` at most."""

    __slots__ = (
        "_asked",
        "_attempts_max",
        "_context",
        "_error",
        "_lost",
        "_named",
        "_patience",
        "_router",
        "_tried",
        "_until",
    )

    def __init__(
        self,
        router: Router,
        context: Context,
        asked: Asked,
        attempts_max: int,
    ) -> None:
        self._router, self._context, self._attempts_max = router, context, attempts_max
        self._asked, self._patience, self._named = asked, asked.patience, asked.instance_id
        self._tried: list[str] = []
        self._lost = set(() if self._patience is None else self._patience.lost)
        self._error: TrinamoError | None = None
        """Of the last attempt; a refusal for want of room outweighs what came after it."""
        self._until: float | None = None

    async def choose(self) -> Instance:
        """The instance to try now.

        Waits for one if nobody is there, as `patience` allows, and raises `UnavailableError` then.
        Otherwise raises what the last attempt ended with.
        """
        try:
            return self._pick()
        except UnavailableError as nobody:
            if self._patience is not None and self._named is None and self._may_wait:
                return await self._wait(nobody.message)
            # The reason of the last attempt says more than "nobody is left".
            raise self._error or nobody from None

    def fail(self, instance: Instance, error: TrinamoError) -> None:
        """An attempt ended with `error`, one of `ELSEWHERE`: if it was the last one, raises why nobody took it."""
        self._router.fail(instance, error, self._context)
        forget_frames(error)
        if not isinstance(self._error, OverloadedError):
            self._error = error
        if isinstance(error, _LOST):
            self._lost.add(instance.id)
        context = self._context
        if context.is_stopped or is_suspect(context):
            raise error
        is_last = self._named is not None or len(self._tried) >= self._attempts_max
        if not is_last or self._waits_for_room:
            return
        # All that were there died at once, and are listed until their leases end: nothing was
        # tried, and there may be time to wait.
        why = self._error
        if self._patience is None or self._named is not None or not isinstance(why, ConnectError):
            raise why
        self._until = self._until or trio.current_time() + self._router.wait_s
        if trio.current_time() >= self._until:
            raise why

    @property
    def _waits_for_room(self) -> bool:
        patience = self._patience
        return (
            patience is not None
            and patience.waits_for_room
            and isinstance(self._error, OverloadedError)
        )

    @property
    def _may_wait(self) -> bool:
        error = self._error
        is_nobody = error is None or isinstance(error, (*_LOST, UnavailableError))
        return (is_nobody or self._waits_for_room) and not self._context.is_stopped

    def _pick(self) -> Instance:
        router, tried = self._router, self._tried
        exclude: Collection[str] = ()
        if tried or self._lost:
            exclude = {each for each in tried if each not in self._lost}
            exclude.update(each for each in self._lost if not router.is_well(each))
        among = self._asked.among
        instance = router.choose(
            instance_id=self._named,
            exclude=exclude,
            among=among() if callable(among) else among,
            hint=self._asked.hint,
        )
        tried.append(instance.id)
        return instance

    async def _wait(self, nobody: str) -> Instance:
        router, context, failed = self._router, self._context, self._error
        # Of the whole search: whom each that comes sends away does not wait for ever.
        self._until = self._until or trio.current_time() + router.wait_s
        with router.waiting(len(self._asked.payload)), context.trace.begin("wait"):
            while trio.current_time() < self._until and not context.is_stopped:
                with trio.move_on_at(min(self._until, trio.current_time() + LOOK_INTERVAL_S)):
                    await router.wait_joined()
                if self._waits_for_room:
                    self._tried.clear()
                try:
                    return self._pick()
                except UnavailableError as error:
                    nobody = error.message
            if isinstance(failed, OverloadedError):
                raise failed
            why = "" if failed is None else f"; before that: {failed.message}"
            raise UnavailableError(
                f"{nobody}, and none came in {router.wait_s:g} s{why}",
                definite=failed is None or failed.definite,
            ) from failed
