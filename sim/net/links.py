"""The wires between hosts: latency, jitter, bandwidth, loss and cuts, per direction.

`Links` holds one `Link` for every ordered pair of hosts that ever talked. `shape` gives a profile
to all links whose ends match two patterns, those to come included; a later `shape` wins, field by
field. Whether a segment passes, and when it arrives, is asked here by TCP (`connection.py`), UDP (`datagrams.py`) and by
the message bus (`bus.py`), so that one cut silences all.

What this module does not do: repeat what was lost. TCP does, and so feels loss as delay; UDP and the
bus do not, and lose the message.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import attrs

from ..core.host import HostState
from ..core.trace import Fields

if TYPE_CHECKING:
    from ..core.world import World


JITTER_STEPS = 16


LABEL_MAX = 60


@attrs.define
class Link:
    """One direction between two hosts; its fields may be changed at any time.

    `bytes_per_s` 0 means unlimited. `loss_one_in` n loses one segment or message in n (0: none).
    `fin_delay_s` holds back the end of a connection, as a peer does that closes slowly.
    `duplicate_one_in` n doubles one UDP datagram in n, `reorder_one_in` n holds one in n back until
    others may have overtaken it.
    """

    latency_s: float = 0.0005
    jitter_s: float = 0.0002
    bytes_per_s: float = 0.0
    loss_one_in: int = 0
    fin_delay_s: float = 0.0
    duplicate_one_in: int = 0
    reorder_one_in: int = 0
    is_cut: bool = False
    free_at_s: float = 0.0
    """When the last byte handed to this link will have left it."""
    name: str = ""
    """From where to where, for people."""


PROFILE_FIELDS = (
    *("latency_s", "jitter_s", "bytes_per_s", "loss_one_in", "fin_delay_s"),
    *("duplicate_one_in", "reorder_one_in"),
)


class Links:
    """All links of a world; `default` is what a link nobody shaped is like."""

    def __init__(self, world: World, default: Link) -> None:
        self._world = world
        self._default = default
        self._links: dict[tuple[str, str], Link] = {}
        self._profiles: list[tuple[str, str, dict[str, float]]] = []

    def link(self, source: str, destination: str) -> Link:
        """The link in this direction; made from the default and the profiles on first use."""
        key = (source, destination)
        found = self._links.get(key)
        if found is None:
            found = self._links[key] = attrs.evolve(self._default, name=f"{source} → {destination}")
            for pattern, to, profile in self._profiles:
                if fnmatchcase(source, pattern) and fnmatchcase(destination, to):
                    _apply(found, profile)
        return found

    def shape(self, source: str = "*", destination: str = "*", /, **profile: float) -> None:
        """Give every link from `source` to `destination` (patterns with `*`) these fields.

        Raises `ValueError` for a field a profile does not have, or a negative value.
        """
        for name, value in profile.items():
            if name not in PROFILE_FIELDS:
                raise ValueError(f"a link has no {name!r}; it has {', '.join(PROFILE_FIELDS)}")
            if not value >= 0:
                raise ValueError(f"{name} must not be negative, and is {value}")
        self._profiles.append((source, destination, profile))
        for (left, right), link in self._links.items():
            if fnmatchcase(left, source) and fnmatchcase(right, destination):
                _apply(link, profile)

    def passes(self, source: str, destination: str) -> bool:
        """Whether anything gets from `source` to `destination` now: no cut, both machines on."""
        if self.link(source, destination).is_cut:
            return False
        world = self._world
        return not world.power_was_cut or (
            world.host(source).state is not HostState.OFF
            and world.host(destination).state is not HostState.OFF
        )

    def delay_s(self, link: Link, *, size: int = 0, has_jitter: bool = True) -> float:
        """How long `size` bytes handed over now take to arrive; they occupy the link meanwhile."""
        delay_s = link.latency_s
        if size and link.bytes_per_s:
            now_s = self._world.current_time()
            link.free_at_s = max(now_s, link.free_at_s) + size / link.bytes_per_s
            delay_s += link.free_at_s - now_s
        if has_jitter and link.jitter_s:
            step = self._world.choices.below(JITTER_STEPS, "jitter")
            if step:
                self._world.choices.about(link.name)
            delay_s += link.jitter_s * step / (JITTER_STEPS - 1)
        return delay_s

    def loses(self, link: Link) -> bool:
        """Whether the next segment or message is lost on the way; a decision of its own."""
        one_in = link.loss_one_in
        if one_in <= 0 or not self._world.choices.chance(max(2, one_in), "loss"):
            return False
        self._world.choices.about(link.name)
        return True

    def cut(self, source: str, destination: str, *, one_way: bool = False) -> None:
        """Nothing passes from `source` to `destination`, nor back unless `one_way`."""
        self.link(source, destination).is_cut = True
        if not one_way:
            self.link(destination, source).is_cut = True

    def heal(self, source: str, destination: str) -> None:
        """Undo `cut` in both directions."""
        self.link(source, destination).is_cut = self.link(destination, source).is_cut = False


def _apply(link: Link, profile: dict[str, float]) -> None:
    for name, value in profile.items():
        setattr(link, name, int(value) if name.endswith("_one_in") else float(value))


@attrs.define(eq=False, slots=False)
class Wires:
    """What all connections of a world share: its links, and how TCP behaves on them."""

    world: World
    links: Links
    tear_one_in: int
    short_one_in: int
    window_bytes: int
    connect_timeout_s: float
    retransmit_s: float
    describe: Callable[[bytes], str | None] | None = attrs.field(default=None, init=False)
    """What the bytes of a segment say, for its arrow on the page, in a word or two; None if nothing."""

    def labels(self, data: bytes) -> Fields:
        """The label of a segment as a field of its row, at most `LABEL_MAX` characters."""
        if self.describe is None or not data:
            return ()
        try:
            text = self.describe(data)
        except Exception as error:  # noqa: BLE001 -- a mistake in a label is no failure of the run
            text = f"not described: {type(error).__name__}"
        return (("label", str(text)[:LABEL_MAX]),) if text else ()

    def link(self, source: str, destination: str) -> Link:
        """The link in this direction; change its fields to change its behaviour."""
        return self.links.link(source, destination)
