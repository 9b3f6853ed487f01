"""One deterministic run: virtual time, the hosts in it, its limits, and what ended it.

The clock is the event engine. trio asks its clock how long to sleep exactly when no task can run;
there the world takes the next event (a delivery, a fault) or jumps to the next deadline, and
answers 0. The scheduler (`scheduler.py`) stands in for trio's dice. All decisions come from one
`Choices`, everything that happens goes into one `Trace`.

What this module does not do: sockets (`network.py`) and fault plans (scenarios call `after`,
`after_note`, `kill`, `pause` and the network's faults). Two approximations are known: a killed
host's timers still wake the loop, without effect; and cancellation callbacks of a paused task run
at once.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import trio
from typing_extensions import override

from .choices import Choices
from .errors import Deadlock, StepLimit, TimeLimit
from .guard import Ambient, Loop, armed, closed_world, task_number
from .host import CURRENT, DRIVER, Host, HostState, Incarnation, incarnation_of
from .scheduler import Policy, Scheduler
from .trace import Trace

if TYPE_CHECKING:
    from trio.lowlevel import Task

__all__ = ["WALL_EPOCH_S", "World"]

WALL_EPOCH_S = 1_700_000_000.0
"""What the wall clock of a host without skew shows at the start, in Unix seconds."""
UNWINDING_STEPS_MAX = 200_000
"""How many steps the cancelled tasks may take after the run before it is given up."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class World(trio.abc.Clock):
    """A run to be; `run` may be called once.

    `steps_max` bounds task steps, `virtual_s_max` virtual time. `trace_steps` False leaves the
    steps out of the trace: shorter, and blind to differences that never become visible. `ambient`
    says what reading real time or dice does (see `guard.py`).
    """

    def __init__(
        self,
        choices: Choices,
        *,
        policy: Policy = "batch",
        steps_max: int = 2_000_000,
        virtual_s_max: float = 3600.0,
        ambient: Ambient = "raise",
        buggify: bool = False,
        trace_steps: bool = True,
    ) -> None:
        self.choices = choices
        self.trace = Trace()
        self.steps = self.events = self._unwinding_steps = 0
        self.buggify_enabled = buggify
        self.ended_s = 0.0
        """When `main` returned or the run failed, in virtual seconds."""
        self.error: BaseException | None = None
        self.is_unwinding = False
        self.on_start: list[Callable[[], None]] = []
        """Called inside the run before anything else, such as: install the network."""
        self.on_end: list[Callable[[Host], None]] = []
        """Called when a process ends, by return or by kill: its kernel closes its sockets."""
        self._steps_max, self._virtual_s_max = steps_max, virtual_s_max
        self._ambient: Ambient = ambient
        self._trace_steps = trace_steps
        self._scheduler = Scheduler(choices, policy, self._on_batch)
        self._time_s = 0.0
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._sequence = itertools.count()
        self._hosts: dict[str, Host] = {}
        self._graves: list[Task] = []
        self._note_counts: Counter[str] = Counter()
        self._note_events: dict[tuple[str, int], list[Callable[[], object]]] = {}
        self._task_base: int | None = None
        self._main_scope = trio.CancelScope()
        self._loop: Loop | None = None
        self._nursery: trio.Nursery | None = None

    # --- running -----------------------------------------------------------------------------

    def run(self, main: Callable[[], Awaitable[None]]) -> str:
        """Run `main` on the driver host until it returns; the digest of the trace.

        Hosts still up then are cancelled, outside the trace. Raises what `main` or a host's main
        function raised, or a `SimulationError`, or `Escape`.
        """
        if self._loop is not None:
            raise RuntimeError("a world runs once; make another")
        with closed_world(
            self._scheduler,
            ambient=self._ambient,
            wall=self.wall,
            now=self.current_time,
            rng=self.choices.stream("ambient"),
            on_escape=self._fail,
        ):
            trio.run(self._shell, main, clock=self)
        if self.error is not None:
            raise self.error
        return self.trace.digest

    async def _shell(self, main: Callable[[], Awaitable[None]]) -> None:
        # Armed round the nursery, so that cancelled hosts clean up under the guard too.
        with armed(self._fail):
            async with trio.open_nursery() as self._nursery:
                try:
                    with self._main_scope:
                        for start in self.on_start:
                            start()
                        await main()
                except BaseException as error:  # noqa: BLE001 -- run() raises it
                    self._fail(error)
                self._unwind()
                self._nursery.cancel_scope.cancel()

    def _fail(self, error: BaseException) -> None:
        """End the run with `error`, unless it already failed; callable from anywhere inside it."""
        if self.error is None:
            self.error = error
        if not self.is_unwinding and self._loop is not None:
            self._unwind()
            self._main_scope.cancel()

    def _unwind(self) -> None:
        """Let everything run that was held back, so that it can be cancelled; mute the trace."""
        if self.is_unwinding:
            return
        self.ended_s = self._time_s
        self.is_unwinding = self._scheduler.is_unwinding = self.trace.is_muted = True
        for host in self._hosts.values():
            self._thaw(host)
        self._running_loop.requeue(self._graves)
        self._graves = []

    @property
    def _running_loop(self) -> Loop:
        if self._loop is None:
            raise RuntimeError("the world is not running")
        return self._loop

    # --- time and events: trio.abc.Clock -------------------------------------------------------

    @override
    def start_clock(self) -> None:
        self._loop = Loop()

    @override
    def current_time(self) -> float:
        return self._time_s

    def wall(self) -> float:
        """The running host's wall clock, in Unix seconds."""
        incarnation = CURRENT.get()
        return WALL_EPOCH_S + self._time_s + (incarnation.host.wall_skew_s if incarnation else 0.0)

    @override
    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Nothing can run: make the next thing happen. Called by trio alone."""
        loop = self._running_loop
        if loop.has_idle_waiter:
            return math.inf
        target = min(deadline, self._events[0][0] if self._events else math.inf)
        if target == math.inf:
            if not self.is_unwinding and not loop.has_pending_callback:
                self._fail(Deadlock(f"nothing can run, nothing will happen\n{self.waiting()}"))
            return 0
        if target > self._virtual_s_max and not self.is_unwinding:
            self._fail(TimeLimit(f"{self._virtual_s_max} virtual seconds\n{self.waiting()}"))
            return 0
        self._time_s = max(self._time_s, target)
        while self._events and self._events[0][0] <= self._time_s:
            _, _, call, args = heapq.heappop(self._events)
            self.events += 1
            try:
                call(*args)
            except BaseException as error:  # noqa: BLE001 -- must not unwind through trio's loop
                self._fail(error)
        return 0

    def at(self, time_s: float, call: Callable[..., object], *args: Any) -> None:
        """Call `call(*args)` at virtual time `time_s`, or next if that is over; no task runs then.

        Events of one moment happen in the order in which they were asked for.
        """
        heapq.heappush(self._events, (time_s, next(self._sequence), call, args))

    def after(self, delay_s: float, call: Callable[..., object], *args: Any) -> None:
        """As `at`, in `delay_s` virtual seconds."""
        self.at(self._time_s + delay_s, call, *args)

    def after_note(
        self, kind: str, nth: int, call: Callable[..., object], *args: Any, delay_s: float = 0.0
    ) -> None:
        """Call `call(*args)` once the `nth` note of `kind` (from 1) has been made.

        Faults tied to notes survive changes of timing better than those tied to times.
        """
        calls = self._note_events.setdefault((kind, nth), [])
        calls.append(lambda: self.after(delay_s, call, *args))

    # --- what happened -------------------------------------------------------------------------

    def add_row(self, kind: str, **fields: Any) -> None:
        """Add a row to the trace, on the running task's host."""
        self.trace.add(self._time_s, str(CURRENT.get() or DRIVER), kind, fields)

    def note(self, kind: str, **fields: Any) -> None:
        """Add a fact the simulated code (or the scenario) reports, and set off what waits for it."""
        if self.is_unwinding:
            return
        self.add_row(kind, **fields)
        self._note_counts[kind] += 1
        for call in self._note_events.pop((kind, self._note_counts[kind]), ()):
            call()

    def _on_batch(self, order: list[Task]) -> None:
        if self.is_unwinding:
            self._unwinding_steps += len(order)
            if self._unwinding_steps > UNWINDING_STEPS_MAX:
                raise StepLimit(f"cancelled tasks do not end\n{self.waiting()}")
            return
        self.steps += len(order)
        if self.steps > self._steps_max:
            self._fail(StepLimit(f"{self._steps_max} task steps\n{self.waiting()}"))
        if self._trace_steps and order:
            if self._task_base is None:
                self._task_base = min(task_number(task) for task in order)
            for task in order:
                number = task_number(task) - self._task_base
                self.trace.add(
                    self._time_s, _host(task), "step", {"task": number, "name": _name(task)}
                )

    def waiting(self) -> str:
        """One line for each live task: its host, its name, and where it waits, innermost first."""
        lines = []
        for task in self._running_loop.tasks():
            frames = [
                f"{PurePath(frame.f_code.co_filename).name}:{line} {frame.f_code.co_name}"
                for frame, line in task.iter_await_frames()
            ]
            where = " < ".join(reversed(frames[-4:]))
            lines.append(f"  {_host(task)} {_name(task)}: {where}")
        return "\n".join(lines)

    # --- hosts ---------------------------------------------------------------------------------

    def host(self, name: str) -> Host:
        """The host called `name`; made, and down, if there is none yet."""
        return self._hosts.setdefault(name, Host(name))

    def knows(self, name: str) -> bool:
        """Whether a host of this name was ever booted, or asked for."""
        return name in self._hosts

    def boot(self, name: str, main: Callable[..., Awaitable[object]], *args: Any) -> Host:
        """Start a process on host `name`; an exception that leaves `main` fails the run."""
        host = self.host(name)
        if host.state in (HostState.UP, HostState.PAUSED):
            raise ValueError(f"{host} is running")
        if self._nursery is None:
            raise RuntimeError("the world is not running")
        self._graves += host.frozen
        host.frozen = []
        host.generation += 1
        host.state = HostState.UP
        host.scope, host.ended = trio.CancelScope(), trio.Event()
        self.add_row("boot", host=name, generation=host.generation)
        token = CURRENT.set(Incarnation(host))
        try:
            self._nursery.start_soon(self._host_main, host, main, args, name=f"{name}:main")
        finally:
            CURRENT.reset(token)
        return host

    async def _host_main(
        self, host: Host, main: Callable[..., Awaitable[object]], args: tuple[Any, ...]
    ) -> None:
        incarnation = CURRENT.get()
        assert incarnation is not None
        try:
            with host.scope:
                await main(*args)
        except Exception as error:  # noqa: BLE001 -- run() raises it
            # What a zombie's cleanup raises, once it is unwound after the run, is nobody's fault.
            if not incarnation.is_buried:
                self._fail(error)
        if not incarnation.is_buried:
            self._end(host, HostState.DOWN)

    def _end(self, host: Host, state: HostState) -> None:
        host.state = state
        self.add_row(
            "kill" if state is HostState.DEAD else "exit",
            host=host.name,
            generation=host.generation,
        )
        self._scheduler.hold_back()
        host.ended.set()
        for call in self.on_end:
            call(host)

    def stop(self, name: str) -> None:
        """Cancel the host's main function, as a handled SIGTERM would; its cleanup runs."""
        self.add_row("stop", host=name)
        self.host(name).scope.cancel()

    def kill(self, name: str) -> None:
        """End it as SIGKILL does: no more step of its tasks, no cleanup; its kernel closes its sockets."""
        host = self.host(name)
        if host.state in (HostState.UP, HostState.PAUSED):
            self._end(host, HostState.DEAD)

    def pause(self, name: str) -> None:
        """SIGSTOP: none of its tasks takes a step until `resume`; its kernel goes on."""
        host = self.host(name)
        if host.state is HostState.UP:
            host.state = HostState.PAUSED
            self.add_row("pause", host=name)
            self._scheduler.hold_back()

    def resume(self, name: str) -> None:
        """SIGCONT after `pause`; nothing happens to a host that is not paused."""
        host = self.host(name)
        if host.state is HostState.PAUSED:
            host.state = HostState.UP
            self.add_row("resume", host=name)
            self._thaw(host)

    def _thaw(self, host: Host) -> None:
        tasks, host.frozen = host.frozen, []
        self._running_loop.requeue(tasks)

    def task_count(self, name: str) -> int:
        """How many live tasks the host's present incarnation has; its main function is one."""
        host = self.host(name)
        count = 0
        for task in self._running_loop.tasks():
            incarnation = incarnation_of(task)
            if incarnation is not None and incarnation.host is host:
                count += incarnation.generation == host.generation
        return count


def _host(task: Task) -> str:
    return str(incarnation_of(task) or DRIVER)


def _name(task: Task) -> str:
    # A callable without a name is named by its repr, which holds an address.
    return _ADDRESS.sub("", task.name)
