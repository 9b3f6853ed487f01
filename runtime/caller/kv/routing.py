"""What a router knows under the policy `kv`, and what it chooses by it.

`KvRouting` puts together who holds which blocks (`kv/index.py`, or `recent.py` where nobody tells),
how busy each is predicted to be (`loads.py`) and what that costs (`cost.py`). Which instances may
be chosen at all is the router's business.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Final

import attrs
import trio

from ...config.router import RouterKvConfig
from ...env import draw_id
from ...kv.index import KvIndex
from ...metrics.tallies import Registry, Row
from ...nurseries import open_nursery
from ...planes import EventPlane
from ...protocol.discovery.instances import EndpointName, Instance
from ...protocol.kv.holders import Reach
from ...protocol.kv.names import BlockNames, RoutingHint
from .agreement import Agreement
from .cost import Candidate, Weights, choose, costs
from .loads import ActiveRequest, PredictedLoads, leading
from .recent import RecentBlocks

_log = logging.getLogger("trinamo.router")
_FEW: Final = 8
"""Of instances that hold equally much of a prompt so many are compared; each costs some microseconds."""
_MOST: Final = 64
"""So many holders are compared in all, those who hold most first."""


@attrs.frozen
class KvRoutingStatistics:
    """Gauges and counters at one moment."""

    active_requests: int
    """Under way as predicted, those of other routers included; zero at quiescence."""
    active_blocks: int
    """That these use, each counted once an instance."""
    waiting_prefill_tokens: int
    """Of prompts whose first token has not come."""
    routers: int
    """Other routers that tell what they send."""
    recent_blocks: int
    """Blocks that are only thought to be held, because they were sent there lately."""
    requests: int
    """Sent, with their prompts known; those that were sent again counted again."""
    hits: int
    """Of these, how many went to an instance that had their first block."""
    prompt_blocks: int
    """Full blocks of their prompts."""
    overlap_blocks: int
    """Of these, how many were there already."""


class KvRouting:
    """The knowledge of one router; everything but `run` is synchronous.

    A request costs, beyond the naming of its blocks, look-ups in the index and some microseconds
    for each instance that is compared; see `choose`.
    """

    def __init__(
        self,
        events: EventPlane,
        endpoint: EndpointName,
        config: RouterKvConfig,
        rng: random.Random,
        names: BlockNames,
    ) -> None:
        self._rng = rng
        self._block_tokens = 0
        """Of a block, in `load`; 0 until a prompt has told."""
        self.names = names
        """What a prompt's blocks are called here, and at those workers whose events are followed."""
        self._loads = PredictedLoads()
        self.weigh(config)
        self.index = KvIndex(events, endpoint) if config.events else None
        """None with `router.kv.events: false`."""
        self._endpoint = endpoint
        self._silent: set[str] = set()
        """Instances that keep blocks and do not tell which, in names that we know."""
        self._recent = RecentBlocks(config.ttl_s)
        router_id = draw_id(rng)
        self._agreement = (
            Agreement(events, endpoint, router_id, self._loads) if config.sync else None
        )
        self._number = 0
        self._ours: dict[Hashable, int] = {}
        self._requests = self._hits = self._prompt_blocks = self._overlap_blocks = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow the workers' events and other routers until cancelled."""
        async with open_nursery() as nursery:
            if self.index is not None:
                await nursery.start(self.index.run)
            if self._agreement is not None:
                await nursery.start(self._agreement.run)
            task_status.started()
            await trio.sleep_forever()

    def weigh(self, config: RouterKvConfig) -> None:
        """Choose by these weights from now on."""
        self._weights = Weights(
            overlap_credit=config.overlap_credit,
            overlap_credit_decay=config.overlap_credit_decay,
            prefill_load_scale=config.prefill_load_scale,
            active_request_weight=config.active_request_weight,
            temperature=config.temperature,
        )
        self._loads.changed(None)

    # --- instances ---

    def tell(self, changed: Callable[[str | None], None]) -> None:
        """Call `changed` with each instance whose `load` has changed; with None: all of them may have."""
        self._loads.changed = changed

    def join(self, instance: Instance) -> None:
        """The instance is in the live set."""
        if self.index is None or instance.kv_events is None:
            return
        if instance.kv_names == self.names.mark:
            self.index.join(instance.id)
            return
        _log.warning(
            "instance %s of %s does not tell which KV blocks it holds by the names in use here (%s"
            " there, %s here): what was sent there lately is taken for held",
            *(instance.id, self._endpoint, instance.kv_names or "none", self.names.mark),
        )
        self._silent.add(instance.id)

    def leave(self, instance_id: str) -> None:
        """The instance has left the live set."""
        self._recent.leave(instance_id)
        self._silent.discard(instance_id)
        if self.index is not None:
            self.index.leave(instance_id)

    # --- requests ---

    def choose(
        self,
        hint: RoutingHint,
        *,
        find: Callable[[str], Instance | None],
        least: Callable[[], Instance],
        everybody: Callable[[], list[Instance]],
    ) -> Instance:
        """The instance that a prompt is sent to at the least cost.

        `find` says who may be chosen of an id, and `least` who of all has the least `load`. Costs
        are compared of this one, and of those who have blocks of the prompt, or a request with its
        first block under way: `_FEW` of each kind, and of those whose blocks reach equally far,
        `_MOST` in all. With `router.kv.temperature` or `overlap_credit_decay`, where each cost
        depends on all, or with blocks of several lengths at one endpoint, they are compared of
        `everybody`.
        """
        weights, keys = self._weights, hint.keys
        reaches = self._reaches(hint)
        self._block_tokens = self._block_tokens or hint.block_tokens
        is_exact = not weights.temperature and not weights.overlap_credit_decay
        if is_exact and hint.block_tokens == self._block_tokens:
            holders = islice(
                chain(*(each.some(_FEW, self._number % 1024) for each in reaches)), _MOST
            )
            found = map(find, chain(holders, self._loads.begun(keys, _FEW)))
            worth = {each.id: each for each in (least(), *found) if each is not None}
            instances = [*worth.values()]
        else:
            instances = everybody()
        candidates = [self._candidate(each.id, hint, reaches) for each in instances]
        prices = costs(weights, candidates, tokens=hint.tokens, block_tokens=hint.block_tokens)
        return instances[choose(prices, weights.temperature, self._rng)]

    def load(self, instance_id: str) -> float:
        """What a prompt costs at an instance that has none of its blocks, beyond what it costs anywhere."""
        load, weights = self._loads.load(instance_id), self._weights
        return (
            weights.prefill_load_scale * load.prefill_tokens / (self._block_tokens or 1)
            + len(load.blocks)
            + weights.active_request_weight * load.requests
        )

    def _candidate(
        self, instance_id: str, hint: RoutingHint, reaches: Sequence[Reach]
    ) -> Candidate:
        load = self._loads.load(instance_id)
        keys = hint.keys
        return Candidate(
            overlap_blocks=_depth(reaches, instance_id),
            prefill_tokens=load.prefill_tokens,
            decode_blocks=len(load.blocks) + len(keys) - leading(load.blocks, keys),
            active_requests=load.requests,
        )

    def _reaches(self, hint: RoutingHint) -> list[Reach]:
        """What is known first, then what is thought."""
        recent = self._recent.reach(hint.keys, trio.current_time())
        if self.index is None or not hint.is_exact:
            return [recent]
        return [self.index.reach(hint.keys), recent]

    def begin(self, instance_id: str, request: Hashable, hint: RoutingHint) -> int | None:
        """`request` is sent to the instance; returns how many of its blocks are there.

        None where its blocks are pieces of text, which say where to go, and not what is saved.
        """
        blocks = _depth(self._reaches(hint), instance_id)
        prefill_tokens = max(hint.tokens - blocks * hint.block_tokens, 0)
        active = ActiveRequest(instance_id, hint.keys, prefill_tokens)
        self._number += 1
        self._ours[request] = number = self._number
        self._loads.begin(number, active)
        if self._agreement is not None:
            self._agreement.began(number, active)
        if self.index is None or not hint.is_exact or instance_id in self._silent:
            self._recent.send(instance_id, hint.keys, trio.current_time())
        self._requests += 1
        self._hits += blocks > 0
        self._prompt_blocks += len(hint.keys)
        self._overlap_blocks += blocks
        return blocks if hint.is_exact else None

    def first_token(self, request: Hashable) -> None:
        """Its first item has come; nothing if it is not ours, or has ended."""
        number = self._ours.get(request)
        if number is not None and self._loads.first_token(number) and self._agreement is not None:
            self._agreement.first_token(number)

    def end(self, request: Hashable) -> None:
        """It is under way no more; nothing if it was not, as one without a hint."""
        number = self._ours.pop(request, None)
        if number is None:
            return
        self._loads.end(number)
        if self._agreement is not None:
            self._agreement.ended(number)

    def statistics(self) -> KvRoutingStatistics:
        """The counts as of now."""
        waiting, blocks = self._loads.totals
        return KvRoutingStatistics(
            active_requests=len(self._loads),
            active_blocks=blocks,
            waiting_prefill_tokens=waiting,
            routers=0 if self._agreement is None else self._agreement.router_count,
            recent_blocks=len(self._recent),
            requests=self._requests,
            hits=self._hits,
            prompt_blocks=self._prompt_blocks,
            overlap_blocks=self._overlap_blocks,
        )


def _depth(reaches: Sequence[Reach], instance_id: str) -> int:
    return next((depth for each in reaches if (depth := each.of(instance_id))), 0)


_ROUTING_GAUGES: Final = {
    "active_requests": "Requests under way as predicted, those of other routers included",
    "active_blocks": "Blocks in use as predicted, over all instances",
    "waiting_prefill_tokens": "Prompt tokens that await their prefill, as predicted",
    "routers": "Other routers that tell what they send",
    "recent_blocks": "Blocks thought to be held, because they were sent lately",
}
_ROUTING_COUNTERS: Final = {
    "requests": "Requests sent by the blocks of their prompts",
    "hits": "Requests sent to an instance that had their first block",
    "prompt_blocks": "Full blocks of the prompts sent",
    "overlap_blocks": "Of these, blocks that the instance had already",
}
_INDEX_GAUGES: Final = {
    "instances": "Instances that blocks are known of, or might be",
    "lost": "Instances whose snapshot is awaited",
    "blocks": "Blocks known, over all instances",
}
_INDEX_COUNTERS: Final = {
    "events": "KV events applied",
    "snapshots": "Snapshots taken",
    "gaps": "Times that an event was missing",
    "backwards": "Times that numbers went back",
    "duplicates": "Events that came twice",
    "outdated": "Events and snapshots of an earlier incarnation",
    "restarts": "Incarnations that followed another one",
    "malformed": "Messages that made no sense",
    "unknown": "Events of instances that discovery does not know",
    "ignored": "Events of instances beyond the bound",
    "refused_blocks": "Blocks not kept because a bound was reached",
    "overflowed": "Times that too many events waited for a snapshot",
}


@contextmanager
def showing(metrics: Registry, endpoint: str, routing: KvRouting | None) -> Iterator[None]:
    """Show what is known of the blocks and loads of an endpoint's instances, while inside.

    The last client of the endpoint that was opened is shown.
    """
    if routing is None:
        yield
        return
    tables = [
        metrics.readings(
            "kv_routing_",
            ("endpoint",),
            _routing_rows,
            gauges=_ROUTING_GAUGES,
            counters=_ROUTING_COUNTERS,
        )
    ]
    if routing.index is not None:
        tables.append(
            metrics.readings(
                "kv_index_",
                ("endpoint",),
                _index_rows,
                gauges=_INDEX_GAUGES,
                counters=_INDEX_COUNTERS,
            )
        )
    for table in tables:
        table.shown[endpoint] = routing
    try:
        yield
    finally:
        for table in tables:
            if table.shown.get(endpoint) is routing:
                del table.shown[endpoint]


def _routing_rows(shown: Mapping[str, KvRouting]) -> Iterator[Row]:
    for endpoint, routing in shown.items():
        yield (endpoint,), attrs.asdict(routing.statistics())


def _index_rows(shown: Mapping[str, KvRouting]) -> Iterator[Row]:
    for endpoint, routing in shown.items():
        if routing.index is not None:
            yield (endpoint,), routing.index.statistics()
