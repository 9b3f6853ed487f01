"""Which instance gets a request: pure functions of candidates, load and an rng."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from typing import Final

from .candidates import Group, Measure


class Policy(enum.StrEnum):
    """How to choose among equals."""

    ROUND_ROBIN = "round_robin"
    """Each in its turn."""
    RANDOM = "random"
    """Any, drawn for each request."""
    DIRECT = "direct"
    """The one that the request names (over HTTP in `X-Trinamo-Worker`), even if it failed just now."""
    LEAST_LOADED = "least_loaded"
    """The fewest requests under way; the first of the least loaded after the last pick."""
    POWER_OF_TWO = "power_of_two"
    """Of two that are drawn, the one with fewer requests under way: routers that know little of each
    other do not all run to the same one."""
    KV = "kv"
    """By the blocks that each holds of a prompt and by predicted load, which `runtime/caller/kv/` weighs; as
    `least_loaded` for requests of which no prompt is known."""


TOLD_LOAD: Final = frozenset({Policy.LEAST_LOADED, Policy.POWER_OF_TWO, Policy.KV})
"""Under these, workers tell how busy they are and whether they drain."""


def pick(
    policy: Policy,
    group: Group,
    without: Sequence[int],
    *,
    turn: int,
    load: Measure,
    rng: random.Random,
) -> int:
    """Choose one of `group`, and none of `without`, all of them there; somebody is left.

    `turn` counts picks, `load` says how many requests are under way to one. `direct` chooses nobody.
    """
    match policy:
        case Policy.RANDOM:
            return group.nth(rng.randrange(len(group) - len(without)), without)
        case Policy.POWER_OF_TWO:
            count = len(group) - len(without)
            drawn = rng.sample(range(count), min(count, 2))
            return min((group.nth(each, without) for each in drawn), key=load)
        case Policy.LEAST_LOADED | Policy.KV:
            return group.least(load, turn, without)
        case _:
            return group.nth(turn, without)
