"""Mistakes in going on with an answer at another worker; see `bugs.py`."""

from __future__ import annotations

from typing import Any

import msgspec
import trio

from trinamo.runtime.caller import migration
from trinamo.runtime.caller.migration import VERDICTS, MigratingAnswer, Verdict
from trinamo.runtime.context import Context

from .planting import Patch, bug


@bug
def replay_repeats_the_last() -> list[Patch]:
    """The replay is told of all delivered tokens but the last, which comes again."""
    resumed = MigratingAnswer._resumed  # noqa: SLF001 -- what is replaced

    def short(self: Any) -> Any:
        request = resumed(self)
        return msgspec.structs.replace(request, delivered_ids=request.delivered_ids[:-1])

    return [(MigratingAnswer, "_resumed", short)]


@bug
def replay_skips_one() -> list[Patch]:
    """The replay is told of a token that was never delivered, which so is lost."""
    resumed = MigratingAnswer._resumed  # noqa: SLF001 -- what is replaced

    def long(self: Any) -> Any:
        request = resumed(self)
        if not request.delivered_ids:
            return request
        more = [*request.delivered_ids, request.delivered_ids[-1]]
        return msgspec.structs.replace(request, delivered_ids=more)

    return [(MigratingAnswer, "_resumed", long)]


@bug
def replay_forgets_a_batch() -> list[Patch]:
    """Of tokens that came together only the first are written down."""
    take = MigratingAnswer.take

    def forgetful(self: Any, items: list[Any]) -> bool:
        has_room = take(self, items)
        if len(items) > 1:
            del self._token_ids[-len(items[-1].token_ids) :]
        return has_room

    return [(MigratingAnswer, "take", forgetful)]


@bug
def replay_begins_anew() -> list[Patch]:
    """The replay is asked for the whole answer."""
    return [(MigratingAnswer, "_resumed", lambda self: self._request)]


@bug
def replay_draws_its_own_seed() -> list[Patch]:
    """Each worker draws a seed of its own."""
    return [(migration, "_seeded", lambda request, _: request)]


@bug
def replay_is_nobodys() -> list[Patch]:
    """A replay has a context and a scope of its own, which the client's leaving does not reach."""
    run = MigratingAnswer._run_stream  # noqa: SLF001 -- what is replaced

    async def alone(self: Any) -> bool:
        if self._tried:
            self._context = Context(f"{self._context.id}-replay")
        with trio.CancelScope(shield=bool(self._tried)):
            return await run(self)
        raise AssertionError("nothing cancels a scope of its own")

    return [(MigratingAnswer, "_run_stream", alone)]


@bug
def stopped_is_replayed() -> list[Patch]:
    """A request that was stopped is replayed when its worker dies."""
    lenient = {**VERDICTS, Verdict.STOPPED: lambda *_: False}
    return [(migration, "VERDICTS", lenient)]


@bug
def cut_looks_whole() -> list[Patch]:
    """The engine's last word decides whether an answer is whole, not who stopped it."""
    return [(Context, "cut_by", None)]
