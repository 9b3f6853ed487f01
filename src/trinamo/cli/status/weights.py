"""Who holds which model files, and who takes them now: as the holders' status ports say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Annotated, Any

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Held(msgspec.Struct):
    model: str
    sha256: str
    byte_count: _Count


class _Lent(msgspec.Struct):
    taker: str
    sha256: str
    done: _Count
    count: Annotated[int, msgspec.Meta(ge=1)]

    def __str__(self) -> str:
        return f"{self.taker or 'a peer'}: {min(self.done, self.count) * 100 // self.count} %"


class _Told(msgspec.Struct):
    held: list[_Held] = []
    lent: list[_Lent] = []


class WeightsRow(msgspec.Struct, frozen=True, kw_only=True):
    """One file of one holder."""

    instance_id: str
    model: str
    sha256: str
    byte_count: int
    takers: list[str]
    """Who takes it now, and how much of it each has."""


def weights_rows(
    healths: Iterable[tuple[str, dict[str, Any] | None]],
) -> Iterator[WeightsRow]:
    """By instance id, what workers' status ports said, once a worker; nonsense is passed over."""
    told: dict[str, _Told] = {}
    for instance_id, health in healths:
        with suppress(msgspec.ValidationError, KeyError):
            told[instance_id] = msgspec.convert((health or {})["weights"], _Told)
    for instance_id, each in told.items():
        for held in each.held:
            yield WeightsRow(
                instance_id=instance_id,
                model=held.model,
                sha256=held.sha256,
                byte_count=held.byte_count,
                takers=[str(lent) for lent in each.lent if lent.sha256 == held.sha256],
            )
