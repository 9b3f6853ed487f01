"""What is streamed in `response_stream.py`, what breaks, and what is held against what came of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from trinamo.sim.core.host import HostState
from trinamo.sim.core.policies import Policy
from trinamo.sim.core.world import World

CALLER, WORKER = "caller", "worker"
HANDLER_END_S_MAX = 0.005
"""From the caller's end of a stream to the handler's, one latency included."""

FaultKind = Literal[
    "reset",
    "kill worker",
    "kill caller",
    "pause worker",
    "pause caller",
    "cut",
    "cut worker to caller",
    "cut caller to worker",
]


@dataclass(frozen=True)
class Fault:
    """`kind` strikes `at_s` after the start, or after the `nth` note `on`.

    Cuts and pauses are undone after `lasts_s`; infinite means never, which only cuts may be.
    """

    kind: FaultKind
    at_s: float = 0.0
    on: str = ""
    nth: int = 1
    lasts_s: float = 1.0


@dataclass(frozen=True)
class Plan:
    """How much is streamed, how the consumer behaves, what the network does, what breaks.

    `stop_after`, `kill_after` and `leave_after` count items consumed of each stream; -1 is never.
    """

    streams: int = 2
    items: int = 20
    item_bytes: int = 40
    gap_s: float = 0.002
    stop_after: int = -1
    kill_after: int = -1
    leave_after: int = -1
    tear_one_in: int = 4
    short_one_in: int = 4
    window_bytes: int = 65536
    policy: Policy = "batch"
    carrier: Literal["multiplexed", "dedicated"] = "multiplexed"
    faults: tuple[Fault, ...] = ()


@dataclass
class Outcome:
    """What became of a run: the trace's digest, each stream's two ends, what was left over."""

    world: World
    plan: Plan
    digest: str = ""
    sent: dict[int, list[int]] = field(default_factory=dict)
    got: dict[int, list[int]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    """Streams whose handler said Sentinel after all its items."""
    terminals: dict[int, list[str]] = field(default_factory=dict)
    handlers: dict[int, bool] = field(default_factory=dict)
    """Streams whose handler was started, and whether it has ended."""
    leftovers: list[str] = field(default_factory=list)
    is_whole: bool = False
    """Whether a last stream was asked for, when all was whole again; no fault strikes any more."""
    last_terminals: list[str] = field(default_factory=list)
    last_got: list[int] = field(default_factory=list)

    def violations(self) -> list[str]:
        """The invariants that do not hold, in words; empty if all is well."""
        broken = list(self.leftovers)
        is_caller_alive = self.world.host(CALLER).state is not HostState.DEAD
        is_worker_alive = self.world.host(WORKER).state is not HostState.DEAD
        for stream in range(self.plan.streams):
            sent, got = self.sent.get(stream, []), self.got.get(stream, [])
            terminals = self.terminals.get(stream, [])
            if got != sent[: len(got)]:
                broken.append(f"I1: stream {stream} got {got}, which is no prefix of {sent}")
            if len(terminals) > 1 or (is_caller_alive and not terminals):
                broken.append(f"I2: stream {stream} has the terminals {terminals}")
            if terminals == ["complete"] and (stream not in self.finished or got != sent):
                broken.append(f"I2: stream {stream} is complete with {len(got)} of {len(sent)}")
            if is_worker_alive and self.handlers.get(stream) is False:
                broken.append(f"I5: the handler of stream {stream} has not ended")
        if self.is_whole:
            broken += self._failures_of_the_last()
        if not self.plan.faults:
            broken += [*self._unexcused(), *self._late_handlers()]
        return broken

    def _failures_of_the_last(self) -> list[str]:
        """Progress: both hosts and the link between them are whole, so the last stream is too."""
        if self.last_terminals == ["complete"] and self.last_got == list(range(self.plan.items)):
            return []
        return [
            f"I15: the last stream, after all faults, has {self.last_terminals} and {self.last_got}"
        ]

    def _unexcused(self) -> list[str]:
        """Progress without faults: each stream ends as its consumer wants it to."""
        allowed = [["complete"]]
        if self.plan.kill_after > 0:
            allowed += [["KilledError"], []]
        if self.plan.leave_after > 0:
            allowed += [["left"]]
        return [
            f"I15: without faults stream {stream} ended with {self.terminals.get(stream)}"
            for stream in range(self.plan.streams)
            if self.terminals.get(stream, []) not in allowed
        ]

    def _late_handlers(self) -> list[str]:
        """I4 on a whole network: a consumer that is gone ends its handler, asleep or not."""
        trace, late = self.world.trace, []
        ended_s = {row.field("stream"): row.time_s for row in trace.of_kind("handler.end")}
        for row in trace.of_kind("stream.end"):
            stream = row.field("stream")
            delay_s = ended_s.get(stream, math.inf) - row.time_s
            if "complete" not in row.field("terminal") and delay_s > HANDLER_END_S_MAX:
                late.append(f"I4: the handler of stream {stream} ended {delay_s:.4f} s late")
        return late
