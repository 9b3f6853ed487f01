"""How busy each instance is, as routers predict it from the requests that they send and see end.

What instances report comes once a second; a burst of requests is over by then. So a router counts a
request from the moment it is sent: its prompt's tokens that are not held there until its first
token has come, and its blocks until its end. What other routers send is counted as they tell it
(`agreement.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

import attrs


def leading(blocks: Mapping[int, object], keys: Sequence[int]) -> int:
    """How many leading ones of `keys` are in `blocks`, where those before one that is are too."""
    if not keys or keys[0] not in blocks:
        return 0
    low, high = 1, len(keys) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        if keys[middle - 1] in blocks:
            low = middle
        else:
            high = middle
    return low


@attrs.define(eq=False)
class ActiveRequest:
    """One request under way."""

    instance_id: str
    keys: Sequence[int]
    """Of its prompt's full blocks."""
    prefill_tokens: int
    """Of its prompt that its instance has to compute; 0 once its first token has come."""


@attrs.define(eq=False)
class InstanceLoad:
    """What is under way to one instance."""

    blocks: dict[int, int] = attrs.Factory(dict)
    """The full blocks of its prompts, each with the number of requests that have it."""
    prefill_tokens: int = 0
    requests: int = 0


_IDLE: Final = InstanceLoad()


class PredictedLoads:
    """The load of each instance; empty once every request that began has ended.

    Bounded by the requests under way. A request costs a look-up or two, and twice some 50 ns for
    each block of its prompt.
    """

    def __init__(self) -> None:
        self._loads: dict[str, InstanceLoad] = {}
        self._active: dict[Hashable, ActiveRequest] = {}
        self._beginnings: dict[int, dict[str, int]] = {}
        """The first blocks of these requests, each with its instances and how many of theirs begin so."""
        self.changed: Callable[[str | None], None] = lambda _: None
        """Called with an instance whose load has changed; None: what loads count for has."""

    def __len__(self) -> int:
        """Requests under way."""
        return len(self._active)

    def load(self, instance_id: str) -> InstanceLoad:
        """What is under way to an instance; to be read only."""
        return self._loads.get(instance_id, _IDLE)

    def begun(self, keys: Sequence[int], few: int) -> Iterator[str]:
        """Instances that have a request under way with the same first block; `few` of them at most."""
        return islice(self._beginnings.get(keys[0], ()) if keys else (), few)

    @property
    def totals(self) -> tuple[int, int]:
        """Tokens that await their prefill, and blocks in use, over all instances."""
        loads = self._loads.values()
        return sum(each.prefill_tokens for each in loads), sum(len(each.blocks) for each in loads)

    def begin(self, request: Hashable, active: ActiveRequest) -> None:
        """A request was sent. One of that name that is under way already is replaced."""
        self.end(request)
        self._active[request] = active
        load = self._loads.get(active.instance_id)
        if load is None:
            load = self._loads[active.instance_id] = InstanceLoad()
        load.requests += 1
        load.prefill_tokens += active.prefill_tokens
        keys, blocks = active.keys, load.blocks
        shared = leading(blocks, keys)
        for key in keys[:shared]:
            blocks[key] += 1
        blocks.update(dict.fromkeys(keys[shared:], 1))
        if keys:
            beginnings = self._beginnings.setdefault(keys[0], {})
            beginnings[active.instance_id] = beginnings.get(active.instance_id, 0) + 1
        self.changed(active.instance_id)

    def first_token(self, request: Hashable) -> bool:
        """Its prompt has been computed; whether that is news. One that is unknown changes nothing."""
        active = self._active.get(request)
        if active is None or not active.prefill_tokens:
            return False
        self._loads[active.instance_id].prefill_tokens -= active.prefill_tokens
        active.prefill_tokens = 0
        self.changed(active.instance_id)
        return True

    def end(self, request: Hashable) -> bool:
        """It is under way no more; whether it was. One that is unknown changes nothing."""
        active = self._active.get(request)
        if active is None:
            return False
        self.first_token(request)
        del self._active[request]
        self._end(active)
        self.changed(active.instance_id)
        return True

    def _end(self, active: ActiveRequest) -> None:
        keys, instance_id = active.keys, active.instance_id
        if keys:
            beginnings = self._beginnings[keys[0]]
            beginnings[instance_id] -= 1
            if not beginnings[instance_id]:
                del beginnings[instance_id]
            if not beginnings:
                del self._beginnings[keys[0]]
        load = self._loads[instance_id]
        load.requests -= 1
        if not load.requests:
            del self._loads[instance_id]
            return
        blocks = load.blocks
        for key in keys:
            # What others tell need be no chain: then a block may be gone before its last request.
            count = blocks.get(key, 0) - 1
            if count > 0:
                blocks[key] = count
            else:
                blocks.pop(key, None)
