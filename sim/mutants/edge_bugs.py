"""Mistakes of a frontend towards its clients: those that leave, and those that wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import trio

from trinamo.runtime.caller.search import Search
from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.http import chat
from trinamo.runtime.http.admission.admission import Admission, AdmissionQueue
from trinamo.runtime.http.choices import ChoiceSink
from trinamo.runtime.http.models.models import ModelManager
from trinamo.runtime.http.streaming import AnswerDelivery
from trinamo.runtime.metrics.metrics import SUCCESS
from trinamo.runtime.worker.metrics import WorkerRecord

from .planting import NOTHING, instead_of, stands


@instead_of(AdmissionQueue, "wait")
async def waiter_stays(
    wait: Any, self: Any, ticket: Any, wanted: Any, exchange: Any, deadline: float
) -> Any:
    """Nobody hears that a client has left while its request waits: it has a place when its turn comes."""
    deaf: Any = SimpleNamespace(on_gone=lambda _: None)
    ended = await wait(self, ticket, wanted, deaf, deadline)
    if exchange.is_gone:
        await trio.sleep_forever()
    return ended


# Nobody who waits is given the place of a request that ends: each waits until its time is up.
stands("place_lost", (AdmissionQueue, "settle", NOTHING))

# A request that finds nobody ends at once, whoever comes the next moment.
stands("nobody_waits", (Search, "_may_wait", False))


@instead_of(Search, "fail")
def last_attempt_says_why(fail: Any, self: Any, instance: Any, error: TrinamoError) -> None:
    """Whoever was asked last says why nobody took a request, though the others were only full."""
    try:
        fail(self, instance, error)
    except TrinamoError:
        raise error from None


# A model whose workers are all gone was never heard of.
stands("nobody_is_unknown", (ModelManager, "_check_away", NOTHING))


@instead_of(WorkerRecord, "end")
def the_cancelled_stay_counted(end: Any, self: Any) -> None:
    """A worker's gauge of requests falls with those that end well, and not with those that are killed."""
    end(self)
    self.tally.in_flight.value += self.outcome != SUCCESS


# Nobody hears that the HTTP client has left while its answer is made.
stands("disconnect_unseen", (AnswerDelivery, "_client_left", NOTHING))


@instead_of(ChoiceSink, "take")
def choices_mix(take: Any, self: Any, items: list[Any]) -> Any:
    """The deltas of every choice are those of the first."""
    return take(self._to.choices[0], items)


@instead_of(chat, "answer_choices")
def choice_left_out(answer: Any, requests: Any, *more: Any) -> Any:
    """The last choice of an answer is asked of nobody."""
    return answer(requests[:-1], *more)


# What a request took for its further choices stays taken.
stands("place_of_a_choice_lost", (Admission, "give_place", NOTHING))
