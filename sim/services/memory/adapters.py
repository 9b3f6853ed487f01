"""One-sided memory whose adapters stall or break while the rest of the network works.

A stalled adapter keeps what is on its way and lets it land when it goes on, however long nobody has
waited for it any more, unless the process that started it has died meanwhile: its queue died with
it. A broken one loses everything, so that the other side gives up after the fabric's `give_up_s`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from typing_extensions import override

from ...core.host import HostState
from .fabric import MemoryFabric

LOOK_S: Final = 0.01
"""How soon a copy goes on after the process that makes it does."""


class TroubledFabric(MemoryFabric):
    """A `MemoryFabric` with `stalled` and `broken`: the hosts whose adapters are so now.

    With `is_copied` no adapter moves the bytes but the process that started the transfer, as by
    copying between two processes: while it is paused nothing lands, and when it goes on, the rest.
    """

    def __init__(self, *args: Any, is_copied: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_copied = is_copied
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
        by: str = "",
        started_s: float | None = None,
    ) -> None:
        world, ends = self.world, (source, destination)
        began_s = world.current_time() if started_s is None else started_s
        starter = world.host(by or source)
        generation = starter.generation
        was_held = False

        def land() -> None:
            nonlocal was_held
            is_dead = starter.generation != generation or (
                generation > 0 and starter.state not in (HostState.UP, HostState.PAUSED)
            )
            if not self.stalled.isdisjoint(ends):
                was_held = True
                self._waiting.append(land)
            elif self.is_copied and starter.state is HostState.PAUSED and not is_dead:
                was_held = True
                world.after(LOOK_S, land)
            elif not self.broken.isdisjoint(ends) or (was_held and is_dead):
                world.at(max(began_s + self.give_up_s, world.current_time()), give_up)
            else:
                arrive()

        super().carry(source, destination, size, land, give_up, by=by, started_s=began_s)
