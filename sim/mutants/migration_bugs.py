"""Mistakes in going on with an answer at another worker."""

from __future__ import annotations

from typing import Any

import msgspec
import trio

from trinamo.runtime.caller import migration
from trinamo.runtime.caller.client import ResponseStream
from trinamo.runtime.caller.migration import VERDICTS, MigratingAnswer, ReplayVerdict
from trinamo.runtime.context import Context
from trinamo.runtime.engines.loop.step import Ends

from .planting import Patch, bug, instead_of, stands


@instead_of(MigratingAnswer, "_resumed")
def replay_repeats_the_last(resumed: Any, self: Any) -> Any:
    """The replay is told of all delivered tokens but the last, which comes again."""
    request = resumed(self)
    return msgspec.structs.replace(request, delivered_ids=request.delivered_ids[:-1])


@instead_of(MigratingAnswer, "_resumed")
def replay_skips_one(resumed: Any, self: Any) -> Any:
    """The replay is told of a token that was never delivered, which so is lost."""
    request = resumed(self)
    if not request.delivered_ids:
        return request
    more = [*request.delivered_ids, request.delivered_ids[-1]]
    return msgspec.structs.replace(request, delivered_ids=more)


@instead_of(MigratingAnswer, "take")
def replay_forgets_a_batch(take: Any, self: Any, items: list[Any]) -> Any:
    """Of tokens that came together only the first are written down."""
    has_room = take(self, items)
    if len(items) > 1:
        del self._token_ids[-len(items[-1].token_ids) :]
    return has_room


@instead_of(MigratingAnswer, "_resumed")
def replay_begins_anew(_: Any, self: Any) -> Any:
    """The replay is asked for the whole answer."""
    return self._request


@instead_of(Ends, "of")
def least_length_counts_anew(of: Any, request: Any, end_ids: Any, prompt_tokens: int) -> Any:
    """A replay has as many tokens as its request asks for at least, whatever came before it."""
    return of(request, end_ids, prompt_tokens + len(request.delivered_ids))


@instead_of(migration, "_seeded")
def replay_draws_its_own_seed(_: Any, request: Any, *_dice: Any) -> Any:
    """Each worker draws a seed of its own."""
    return request


@bug
def replay_is_nobodys() -> list[Patch]:
    """A replay has a context and a scope of its own, which the client's leaving does not reach."""
    lose, enter, forward = MigratingAnswer._break, ResponseStream.__aenter__, ResponseStream.forward  # noqa: SLF001 -- what is replaced

    def replayed(self: Any, *lost: Any) -> None:
        lose(self, *lost)
        self._context = Context(f"{self._context.id}-replay")

    def shielded(stream: Any) -> trio.CancelScope:
        given = stream._given  # noqa: SLF001 -- what is replaced
        return trio.CancelScope(shield=given is not None and given.id.endswith("-replay"))

    async def begins(self: Any) -> Any:
        with shielded(self):
            return await enter(self)

    async def goes_on(self: Any, sink: Any) -> None:
        with shielded(self):
            await forward(self, sink)

    return [
        (MigratingAnswer, "_break", replayed),
        (ResponseStream, "__aenter__", begins),
        (ResponseStream, "forward", goes_on),
    ]


@bug
def stopped_is_replayed() -> list[Patch]:
    """A request that was stopped is replayed when its worker dies."""
    lenient = {**VERDICTS, ReplayVerdict.STOPPED: lambda *_: False}
    return [(migration, "VERDICTS", lenient)]


# The engine's last word decides whether an answer is whole, not who stopped it.
stands("cut_looks_whole", (Context, "cut_by", None))
