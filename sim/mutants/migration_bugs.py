"""Mistakes in going on with an answer at another worker."""

from __future__ import annotations

from typing import Any

import msgspec
import trio

from trinamo.runtime.caller import migration
from trinamo.runtime.caller.migration import VERDICTS, MigratingAnswer, Verdict
from trinamo.runtime.context import Context

from .planting import Patch, bug, instead_of


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


@instead_of(migration, "_seeded")
def replay_draws_its_own_seed(_: Any, request: Any, *_dice: Any) -> Any:
    """Each worker draws a seed of its own."""
    return request


@instead_of(MigratingAnswer, "_run_stream")
async def replay_is_nobodys(run: Any, self: Any) -> Any:
    """A replay has a context and a scope of its own, which the client's leaving does not reach."""
    if self._tried:
        self._context = Context(f"{self._context.id}-replay")
    with trio.CancelScope(shield=bool(self._tried)):
        return await run(self)


@bug
def stopped_is_replayed() -> list[Patch]:
    """A request that was stopped is replayed when its worker dies."""
    lenient = {**VERDICTS, Verdict.STOPPED: lambda *_: False}
    return [(migration, "VERDICTS", lenient)]


@bug
def cut_looks_whole() -> list[Patch]:
    """The engine's last word decides whether an answer is whole, not who stopped it."""
    return [(Context, "cut_by", None)]
