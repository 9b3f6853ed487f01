"""Which instance gets a request: pure functions of candidates, load and an rng."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Sequence
from typing import Final

from ...errors import RequestError, UnavailableError
from .instances import Instance


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
    candidates: Sequence[Instance],
    *,
    turn: int,
    load: Callable[[str], int],
    rng: random.Random,
    instance_id: str | None = None,
) -> Instance:
    """Choose one of `candidates`.

    `turn` counts picks, `load` says of an instance id how many requests are under way to it. A named
    `instance_id` is honoured under every policy. Raises `UnavailableError` if there is nobody, or
    not the one named, and `RequestError` if `direct` names none.
    """
    if instance_id is not None:
        for instance in candidates:
            if instance.id == instance_id:
                return instance
        raise UnavailableError(f"instance {instance_id} is not live, or does not serve this")
    if policy is Policy.DIRECT:
        raise RequestError(
            "router.policy is direct: a request must name its instance (over HTTP in the header "
            "X-Trinamo-Worker)",
            param="instance_id",
        )
    if not candidates:
        raise UnavailableError("no live instance")
    count = len(candidates)
    match policy:
        case Policy.ROUND_ROBIN:
            return candidates[turn % count]
        case Policy.RANDOM:
            return candidates[rng.randrange(count)]
        case Policy.POWER_OF_TWO:
            drawn = rng.sample(candidates, min(count, 2))
            return min(drawn, key=lambda instance: load(instance.id))
        case Policy.LEAST_LOADED | Policy.KV:
            # Rotated by the turn, so that ties do not all fall on the first instance.
            order = (candidates[(turn + i) % count] for i in range(count))
            return min(order, key=lambda instance: load(instance.id))
