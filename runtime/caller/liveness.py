"""Who listens for silence: looks at the requests of one endpoint, asks workers, gives requests up.

The rules are `protocol/streams/silence.py`; this looks at the clock, sends the probes (`probes.py`)
and ends what is lost. While every request is heard from within the grace there is one task for the
endpoint, which wakes four times in a grace and reads counters. Each instance that is silent, and
each that discovery has deleted, has one task more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Final

import trio

from ..env import Env
from ..logs.instances import InstanceLog
from ..metrics.metrics import Metrics
from ..nurseries import open_nursery
from ..protocol.discovery.instances import EndpointName, Instance, LiveSet
from ..protocol.streams.silence import Inquiry, Reply, Sign, Vigil
from .in_flight import Flight, Flights
from .probes import Way, question

__all__ = ["SilenceWatch"]

_WHY: Final = {
    Sign.SILENCE: ("left", "left discovery and has fallen silent"),
    Sign.UNANSWERED: ("unanswered", "has fallen silent and does not answer"),
    Sign.REPLACED: ("replaced", "has fallen silent, and another answers at its address"),
}
"""What gives a request up, as a metric says it, and a sentence about the instance."""


class SilenceWatch:
    """The requests under way of one endpoint's callers, and what is believed of their workers.

    Bounded by the instances that have requests under way, or that linger.
    """

    def __init__(
        self,
        endpoint: EndpointName,
        flights: Flights,
        live: LiveSet,
        env: Env,
        *,
        grace_s: float,
        ways: Callable[[Instance], Collection[Way]],
        on_change: Callable[[], None],
        metrics: Metrics | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._log = InstanceLog(logging.getLogger("trinamo.router"), endpoint)
        self._flights = flights
        self._live = live
        self._env = env
        self._grace_s = grace_s
        self._ways = ways
        """Those by which an instance that lives would answer."""
        self._on_change = on_change
        self._metrics = metrics
        self._inquiries: dict[str, Inquiry[Flight]] = {}
        self._questions: dict[str, trio.CancelScope] = {}
        self._vigils: dict[str, trio.CancelScope] = {}
        self._nursery: trio.Nursery

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled."""
        wait_s = Inquiry[Flight](self._grace_s).wait_s
        async with open_nursery() as self._nursery:
            task_status.started()
            while True:
                await self._flights.wait_any()
                self._look()
                await trio.sleep(wait_s)

    # --- what discovery says ---

    def vanished(self, instance: Instance) -> None:
        """Discovery has deleted this instance. Who is asked already is asked on."""
        if self._live.is_lingering(instance.id) or self._flights.of(instance.id):
            scope = self._vigils[instance.id] = trio.CancelScope()
            self._nursery.start_soon(self._keep_vigil, instance, scope)

    def returned(self, instance: Instance) -> None:
        """Discovery names this instance, again or for the first time: it lives."""
        for scopes in (self._vigils, self._questions):
            scope = scopes.pop(instance.id, None)
            if scope is not None:
                scope.cancel()
        self._inquiries.pop(instance.id, None)

    # --- deleted and silent ---

    async def _keep_vigil(self, instance: Instance, scope: trio.CancelScope) -> None:
        """Give up requests to an instance that was deleted, once they are silent as well."""
        vigil: Vigil[Flight] = Vigil(self._grace_s)
        with scope:
            while self._flights.of(instance.id) or (
                # One that lingers may yet be given requests.
                self._live.is_lingering(instance.id)
            ):
                begun = {
                    flight: count
                    for flight, count in self._heard(instance.id).items()
                    if not flight.is_waiting
                }
                for flight in vigil.look(begun, trio.current_time()):
                    self._give_up(flight, Sign.SILENCE)
                await trio.sleep(vigil.wait_s)
        if self._vigils.get(instance.id) is scope:
            del self._vigils[instance.id]

    # --- named, silent, and asked ---

    def _look(self) -> None:
        """Begin to ask the instances that have a silent request. Synchronous."""
        now = trio.current_time()
        for instance_id in tuple(self._inquiries):
            if instance_id not in self._flights.load and instance_id not in self._questions:
                del self._inquiries[instance_id]
        for instance_id in self._flights.load:
            inquiry = self._inquiries.setdefault(instance_id, Inquiry(self._grace_s))
            if not inquiry.look(self._heard(instance_id), now):
                continue
            if instance_id not in self._questions and instance_id not in self._vigils:
                instance = self._flights.of(instance_id)[0].instance
                scope = self._questions[instance_id] = trio.CancelScope()
                self._nursery.start_soon(self._question, instance, inquiry, scope)

    async def _question(
        self, instance: Instance, inquiry: Inquiry[Flight], scope: trio.CancelScope
    ) -> None:
        """Ask for as long as a request is silent, and whether one that did not answer is back."""
        self._log.info(
            "instance %s of %s has brought nothing for %g s: it is asked whether it lives",
            instance,
            self._grace_s,
        )
        self._env.note("router.question", instance=instance.id)
        with scope:
            while True:
                asked_at = trio.current_time()
                # It may have moved since.
                known = self._live.get(instance.id) or instance
                reply = await question(self._ways(known), known, self._env, inquiry.wait_s)
                is_silent = self._take(instance, inquiry, reply, asked_at)
                # Probes that wait for as long as the pause leave no moment in which an instance
                # could live unheard.
                await trio.sleep_until(asked_at + inquiry.wait_s)
                is_missed = inquiry.is_unanswered and self._live.get(instance.id) is not None
                if not is_silent and not is_missed:
                    break
        if self._questions.get(instance.id) is scope:
            del self._questions[instance.id]

    def _take(
        self, instance: Instance, inquiry: Inquiry[Flight], reply: Reply, asked_at: float
    ) -> bool:
        """Act on what one probe has brought; whether any request is silent still."""
        was_unanswered, now = inquiry.is_unanswered, trio.current_time()
        is_silent = inquiry.look(self._heard(instance.id), now)
        sign = Sign.REPLACED if reply is Reply.REPLACED else Sign.UNANSWERED
        for flight in inquiry.take(reply, asked_at, now):
            self._give_up(flight, sign)
        if inquiry.is_unanswered:
            # New requests would wait for it as well, if only for its ACK.
            self._live.inhibit(instance.id, now + 2 * inquiry.wait_s)
            self._on_change()
        if inquiry.is_unanswered and not was_unanswered:
            text = "instance %s of %s does not answer: it is passed over"
            self._log.warning(text, instance)
        elif was_unanswered and not inquiry.is_unanswered:
            # Or there is no way to ask it now, and nothing is known.
            says = "cannot be asked" if reply is Reply.UNASKED else "answers"
            self._log.info("instance %s of %s %s", instance, says)
        return is_silent

    # --- both ---

    def _heard(self, instance_id: str) -> dict[Flight, int | None]:
        """What has come of each request that is at its worker and not given up."""
        return {
            flight: flight.heard() if flight.heard else 0
            for flight in self._flights.of(instance_id)
            if flight.on_silent is not None
        }

    def _give_up(self, flight: Flight, sign: Sign) -> None:
        act, flight.on_silent = flight.on_silent, None
        if act is None:
            return
        reason, why = _WHY[sign]
        self._log.warning(
            "instance %s of %s %s: a request to it that brought nothing for %g s is given up",
            flight.instance,
            why,
            self._grace_s,
        )
        self._env.note("router.silence", instance=flight.instance.id, reason=reason)
        if self._metrics is not None:
            self._metrics.silent_request(str(self._endpoint), reason)
        act(why)
