"""Mistakes of a frontend towards its clients: those that leave, and those that wait (see `bugs.py`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import trio

from trinamo.runtime.caller.search import Search
from trinamo.runtime.http.admission.queue import AdmissionQueue
from trinamo.runtime.http.models.models import ModelManager
from trinamo.runtime.http.streaming import Delivery
from trinamo.runtime.metrics.metrics import SUCCESS
from trinamo.runtime.metrics.worker import WorkerRecord

from .planting import Patch, bug


@bug
def waiter_stays() -> list[Patch]:
    """Nobody hears that a client has left while its request waits: it has a place when its turn comes."""
    wait = AdmissionQueue.wait

    async def wait_deaf(self: Any, ticket: Any, wanted: Any, exchange: Any, deadline: float) -> Any:
        deaf: Any = SimpleNamespace(on_gone=lambda _: None)
        ended = await wait(self, ticket, wanted, deaf, deadline)
        if exchange.is_gone:
            await trio.sleep_forever()
        return ended

    return [(AdmissionQueue, "wait", wait_deaf)]


@bug
def place_lost() -> list[Patch]:
    """Nobody who waits is given the place of a request that ends: each waits until its time is up."""
    return [(AdmissionQueue, "settle", lambda _: None)]


@bug
def nobody_waits() -> list[Patch]:
    """A request that finds nobody ends at once, whoever comes the next moment."""
    return [(Search, "_may_wait", False)]


@bug
def nobody_is_unknown() -> list[Patch]:
    """A model whose workers are all gone was never heard of."""
    return [(ModelManager, "_check_away", lambda *_: None)]


@bug
def the_cancelled_stay_counted() -> list[Patch]:
    """A worker's gauge of requests falls with those that end well, and not with those that are killed."""
    end = WorkerRecord.end

    def ends(self: Any) -> None:
        end(self)
        self.tally.in_flight.value += self.outcome != SUCCESS

    return [(WorkerRecord, "end", ends)]


@bug
def disconnect_unseen() -> list[Patch]:
    """Nobody hears that the HTTP client has left while its answer is made."""

    def deaf(self: object) -> None:
        pass

    return [(Delivery, "_client_left", deaf)]
