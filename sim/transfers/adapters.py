"""One-sided memory whose adapters stall or break while the rest of the network works.

A stalled adapter keeps what is on its way and lets it land when it goes on, however long nobody has
waited for it any more. A broken one loses everything, so that the other side gives up after the
fabric's `give_up_s`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from ..services import MemoryFabric

__all__ = ["TroubledFabric"]


class TroubledFabric(MemoryFabric):
    """A `MemoryFabric` with `stalled` and `broken`: the hosts whose adapters are so now."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.stalled: set[str] = set()
        self.broken: set[str] = set()
        self._waiting: list[Callable[[], None]] = []

    def go_on(self, host: str) -> None:
        """The adapter of `host` works again: what it held back arrives now, in order."""
        self.stalled.discard(host)
        waiting, self._waiting = self._waiting, []
        for land in waiting:
            land()

    @override
    def carry(
        self,
        source: str,
        destination: str,
        size: int,
        arrive: Callable[[], None],
        give_up: Callable[[], None],
        *,
        started_s: float | None = None,
    ) -> None:
        began_s = self.world.current_time() if started_s is None else started_s
        ends = (source, destination)

        def land() -> None:
            if not self.stalled.isdisjoint(ends):
                self._waiting.append(land)
            elif not self.broken.isdisjoint(ends):
                self.world.at(max(began_s + self.give_up_s, self.world.current_time()), give_up)
            else:
                arrive()

        super().carry(source, destination, size, land, give_up, started_s=began_s)
