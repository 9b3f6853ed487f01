"""One deterministic run: virtual time, the hosts in it, its limits, and what ended it.

The clock is the event engine (`machines.py`), the scheduler stands in for trio's dice
(`scheduler.py`). All decisions come from one `Choices`, everything that happens goes into one
`Trace`. A process ends by returning, by `stop` (SIGTERM), `kill` (SIGKILL: its kernel says goodbye
for it) or `power_off` (silence).

What this module does not do: sockets (`net/network.py`) and fault plans (scenarios call `after`,
`after_note`, `kill`, `pause` and the network's faults). Two approximations are known: a killed
host's timers still wake the loop, without effect; and cancellation callbacks of a paused task run
at once.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import trio
from typing_extensions import override

from trinamo.points import WORLD

from ..disk.calls import Calls
from ..disk.disk import Disk
from ..disk.process import Descriptors, Process
from ..errors import Deadlock, EndlessStep, Livelock, StepLimit, TimeLimit, parted, standing_for
from ..isolation.ambient import Ambient
from ..isolation.endless import watched
from ..isolation.guard import Loop, armed, breakable, closed_world
from ..isolation.threads import sleep_in_thread
from .checker import Checker
from .choices import Choices
from .host import (
    CURRENT,
    Host,
    HostState,
    Incarnation,
    check_main,
    current_label,
    current_process,
    incarnation_of,
)
from .labels import labels_below, module_of
from .machines import Machines
from .policies import Policy, is_interleaved
from .rules import Predicate, Rule, Rules
from .scheduler import TaskScheduler
from .stacks import TaskLabels, await_stacks, host_of, task_name
from .strikes import Cancellation, Strikes
from .trace import Row, Trace

if TYPE_CHECKING:
    from trio.lowlevel import Task

AnyChecker = TypeVar("AnyChecker", bound=Checker)
_END_ROWS = {HostState.DOWN: "exit", HostState.DEAD: "kill", HostState.OFF: "power_off"}
UNWINDING_STEPS_MAX = 200_000
"""How many steps the cancelled tasks may take after the run before it is given up."""

THREAD_DELAYS_S = (0, 0.0001, 0.0005, 0.002, 0.005, 0.02, 0.1, 0.5)
"""How much later than at once the answer of a thread may come; drawn under the label `thread`."""


class World(Machines):
    """A run to be; `run` may be called once.

    `steps_max` bounds task steps, `virtual_s_max` virtual time, `instant_steps_max` the steps while time
    stands still, which only tasks that spin take; `step_cpu_s_max` the processor's time, as the machine has
    it, of one step (`isolation/endless.py`). `trace_steps` False leaves the steps out of the trace: shorter,
    and blind to differences that never become visible. With `keep_rows` False the trace holds its digest
    only. Who reads the machine's time or dice for itself gets the run's; with `ambient="raise"` only
    libraries do, and others get an `Escape`.
    """

    def __init__(
        self,
        choices: Choices,
        *,
        policy: Policy = "batch",
        steps_max: int = 2_000_000,
        instant_steps_max: int = 20_000,
        virtual_s_max: float = 3600.0,
        step_cpu_s_max: float = 10.0,
        ambient: Ambient = "virtual",
        trace_steps: bool = True,
        keep_rows: bool = True,
    ) -> None:
        super().__init__(Trace(keep=keep_rows), is_interleaved=is_interleaved(policy))
        if choices.world is not None:
            raise ValueError("these choices belong to another world; make new ones")
        self.choices = choices
        choices.world = self
        self.policy: Policy = policy
        self.power_was_cut = False
        """Whether any host was ever without power; spares the wires a look at every one."""
        self.steps = self._unwinding_steps = self._instant_steps = 0
        self.ended_s = self._instant_s = 0.0
        """When `main` returned or the run failed, in virtual seconds."""
        self.error: BaseException | None = None
        self.is_unwinding = self._is_judging = False
        self.until_end = ExitStack()
        """Left when the run is over and its tasks are unwound, before the real names are back."""
        self.on_start: list[Callable[[], None]] = []
        """Called inside the run before anything else, such as: install the network."""
        self.on_end: list[Callable[[Host], None]] = []
        """Called when a process ends; its host's state says how, and what its kernel does now."""
        self.on_power: list[Callable[[Host], None]] = []
        """Called when a host that was without power is booted, before its process starts."""
        self._steps_max, self._instant_steps_max = steps_max, instant_steps_max
        self._virtual_s_max, self._step_cpu_s_max = virtual_s_max, step_cpu_s_max
        self._ambient: Ambient = ambient
        self._trace_steps = trace_steps and choices.traces_steps
        self._scheduler = TaskScheduler(choices, policy, self, self._on_batch, self._requeue)
        self._descriptors = Descriptors()
        self._graves: list[Task] = []
        self._modules: set[str] = set()
        """Where the code of the run's processes is written; see `labels.py`."""
        self._strikes = Strikes(self._on_event_error, self.after, self.noted)
        self._rules = Rules(
            self.current_time, self._fail, lambda: (len(choices.record), self.trace.count)
        )
        self._cancellations: list[Cancellation] = []
        self.checkers: list[Checker] = []
        """The rules that the run is held to; see `watch`."""
        self._labels = TaskLabels()
        self._main_scope = trio.CancelScope()
        self._loop: Loop | None = None
        self._nursery: trio.Nursery | None = None

    # --- running -----------------------------------------------------------------------------

    @property
    def has_run(self) -> bool:
        """Whether `run` was called and got under way."""
        return self._loop is not None

    def run(self, main: Callable[[], Awaitable[None]]) -> str:
        """Run `main` on the driver host until it returns; the digest of the trace.

        Hosts still up then are cancelled, outside the trace. Raises what `main` or a host's main
        function raised, one error of a group, or a `SimulationError`, `Escape` or `EndlessStep`.
        """
        check_main(main, "world.run(main)")
        if self._loop is not None:
            raise RuntimeError("a world runs once; make another")
        self._modules.add(module_of(main))
        self.until_end.callback(WORLD.reset, WORLD.set(self))
        with (
            closed_world(
                self._scheduler,
                ambient=self._ambient,
                wall=self.wall,
                now=self.current_time,
                stream=self.choices.stream,
                later=self._answer_thread,
                advise=lambda hint: self.advisers.append(lambda: [hint]),
                on_escape=self._fail,
            ),
            breakable(lambda: self._running_loop, self._fail),
            self.until_end,
        ):
            trio.run(self._shell, main, clock=self, instruments=self.choices.instruments)
        if self.error is not None:
            raise self.error
        return self.trace.digest

    async def _shell(self, main: Callable[[], Awaitable[None]]) -> None:
        # Armed round the nursery, so that cancelled hosts clean up under the guard too.
        calls = Calls(current_process, self._descriptors, self.choices.stream("tempfile"))
        self.until_end.enter_context(calls.active())
        self.until_end.enter_context(watched(self._step_cpu_s_max, self._progress, self._end_step))
        with armed(self._fail, calls.outside):
            async with trio.open_nursery() as self._nursery:
                try:
                    with self._main_scope:
                        for start in self.on_start:
                            start()
                        await main()
                        self._rules.look("the end of main")
                        self._is_judging = True
                        for checker in self.checkers:
                            checker.at_end()
                except BaseException as error:  # noqa: BLE001 -- run() raises it
                    self._fail(error)
                self._is_judging = False
                self._unwind()
                self._nursery.cancel_scope.cancel()

    def _fail(self, error: BaseException) -> None:
        """End the run with `error`, unless it already failed; callable from anywhere inside it."""
        if self.error is None:
            self.error = standing_for(error)
        if not self.is_unwinding and self._loop is not None:
            self._unwind()
            self._main_scope.cancel()

    def _unwind(self) -> None:
        """Let everything run that was held back, so that it can be cancelled; mute the trace."""
        if self.is_unwinding:
            return
        self.ended_s, self.never_struck = self._time_s, self.planned_faults()
        # Draws that changed nothing one can see make another run all the same, unless when they
        # ended was up to the machine.
        if not isinstance(self.error, EndlessStep):
            self.add_row("drawn", **self.choices.drawn())
        self.is_unwinding = self._scheduler.is_unwinding = self.trace.is_muted = True
        self._rules.is_over = True
        for host in self._hosts.values():
            self._thaw(host)
        self._running_loop.requeue(self._graves)
        self._graves = []

    def _answer_thread(self, at_least_s: float, answer: Callable[[], object]) -> None:
        drawn = 0 if self.is_unwinding else self.choices.below(len(THREAD_DELAYS_S), "thread")
        self.after(at_least_s + THREAD_DELAYS_S[drawn], answer)

    def tasks(self) -> Iterable[Task]:
        """Those that are there now; none where real time runs, whose loop is trio's own."""
        return () if self._loop is None else self._loop.tasks()

    @property
    def _running_loop(self) -> Loop:
        if self._loop is None:
            raise RuntimeError("the world is not running")
        return self._loop

    def _requeue(self, tasks: list[Task]) -> None:
        self._running_loop.requeue(tasks)

    # --- time ----------------------------------------------------------------------------------

    @override
    def start_clock(self) -> None:
        self._loop = Loop()

    @override
    def _on_idle(self, target_s: float) -> float | None:
        loop = self._running_loop
        if any(each.world_rests() for each in tuple(self._cancellations)):
            return 0
        if loop.has_idle_waiter:
            return math.inf
        if target_s == math.inf:
            if self.is_unwinding:
                self._unwinding_steps += 1
                self._check_unwinding()
            elif not loop.has_pending_callback:
                self._fail(Deadlock(f"nothing can run, nothing will happen\n{self.waiting()}"))
            return 0
        due_s = self._rules.due_s
        if due_s < target_s and due_s <= self._virtual_s_max and not self.is_unwinding:
            # Nothing happens before that any more; the look sees it a moment too late.
            self._time_s = math.nextafter(due_s, math.inf)
            self._rules.look()
            return 0
        if target_s > self._virtual_s_max and not self.is_unwinding:
            happening = ", ".join(self.pending_events()) or "no event"
            self._fail(
                TimeLimit(f"{self._virtual_s_max} virtual seconds; {happening}\n{self.waiting()}")
            )
            return 0
        return None

    @override
    def next_happening_s(self) -> float:
        """When the next event or deadline is due, if it may be before the next step; or infinity."""
        loop = self._running_loop
        if loop.has_idle_waiter:
            return math.inf
        next_s = self.next_s(loop.next_deadline)
        return next_s if next_s <= self._virtual_s_max else math.inf

    @override
    def _on_event_error(self, error: BaseException) -> None:
        # Faults planned for later still strike while the run is unwound, and may not find their host.
        if not self.is_unwinding:
            self._fail(error)

    def after_note(
        self,
        kind: str,
        nth: int,
        call: Callable[..., object],
        *args: Any,
        delay_s: float = 0.0,
        name: str = "a fault",
        on: Literal["note"] | None = None,
    ) -> None:
        """Call `call(*args)` at the `nth` note of `kind` (from 1) that is made from now on.

        It comes when the step ends that made the note, or `delay_s` later. Faults tied to notes
        survive changes of timing better than those tied to times. `untested` calls it `name`. With
        `on="note"` it is `call(host, *args)`, and `host` is the name of the host that made the note.
        """
        self._strikes.add(name, kind, nth, call, args, delay_s=delay_s, on=on)

    def cancels(
        self,
        scope: trio.CancelScope,
        points: int = 8,
        *,
        rests: int = 3,
        label: str = "cancelled at",
    ) -> None:
        """Decide whether and where to cancel `scope`: 0 never, n when this task yields the n-th time from now.

        A task yields wherever it blocks, and at checkpoints that only let others run. It is one
        decision with `points + 1` answers, so `explore` with one deviation tries every place at which
        a cancellation may come, up to the last of the `points`. Where the task blocks, a second one
        (`label`, late) says whether it comes at once (0), or only when nothing could run for the n-th
        time since, up to `rests`: then others have come to wait behind it.
        """
        nth = self.choices.below(points + 1, label)
        if not nth:
            return
        task = trio.lowlevel.current_task()

        def how_late() -> int:
            if self._running_loop.may_run(task):
                return 0
            return self.choices.below(rests + 1, f"{label}, late")

        def cut() -> None:
            fields = {"task": task_name(task), "point": nth}
            self.trace.add(self._time_s, host_of(task), "cancel", fields)
            scope.cancel()

        Cancellation(task, nth, how_late, cut, self._cancellations)

    @override
    def _after_event(self) -> None:
        self._strikes.strike()
        self._rules.look()

    @property
    def untested(self) -> list[str]:
        """What a scenario is about and did not come to pass in this run, in sentences.

        Chance may keep it from a run; what no run of a swarm shows was not tested at all. Calls of
        `after_note` whose note never came are among it, and points of the code that nobody `reached`;
        scenarios add to `missed`.
        """
        labels = sorted(labels_below(self._modules).difference(self.noted))
        unreached = [f'nobody reached the point "{label}"' for label in labels]
        waiting = [*self._strikes.missed(), *self._rules.undecided(self.ended_s)]
        return [*waiting, *self.missed, *unreached]

    def hold(self, label: str) -> trio.Event:
        """Hold whoever comes to `points.barrier(label)` from now on, until the returned event is set.

        The barrier is a note of that kind, so `after_note(label, …)` hears who comes.
        """
        gate = self.gates[label] = trio.Event()
        return gate

    # --- what happened -------------------------------------------------------------------------

    def note(self, kind: str, /, **fields: Any) -> None:
        """Add a fact the simulated code (or the scenario) reports, and set off what waits for it."""
        if self.is_unwinding:
            return
        self.add_row(kind, **fields)
        self._strikes.count(kind)
        if self.checkers:
            row = Row(self._time_s, current_label(), kind, tuple(fields.items()))
            try:
                for checker in self.checkers:
                    checker.on(row)
            except Exception as error:  # noqa: BLE001 -- ends the run, where its maker might catch it
                self._fail(error)

    def watch(self, checker: AnyChecker) -> AnyChecker:
        """Hold the run to a rule, which hears of every note from now on; what it raises ends the run."""
        vars(checker)["say"] = self.add_row
        self.checkers.append(checker)
        return checker

    @property
    def is_watched(self) -> bool:
        """Whether a checker, or a rule over its state, holds the run to something."""
        return bool(self.checkers) or self._rules.is_used

    def always(self, rule: str, predicate: Predicate) -> None:
        """Hold the run to a predicate that is true after every step and every event from now on.

        It must only look at the state, and be quick: it is called some thousand times a run. What
        breaks it is a `Violation` of `rule`; what it raises ends the run, too.
        """
        self._rules.add(Rule(rule, predicate, is_always=True))
        self._watch_steps()

    def eventually(self, rule: str, predicate: Predicate, within_s: float) -> None:
        """As `always`, of one that must be true once within `within_s` virtual seconds from now."""
        due_s = self.current_time() + within_s
        self._rules.add(Rule(rule, predicate, within_s=within_s, due_s=due_s))
        self._watch_steps()

    def leads_to(self, rule: str, when: Predicate, then: Predicate, within_s: float) -> None:
        """As `always`: whenever `when` is true, `then` is true by then, or within `within_s` after it."""
        self._rules.add(Rule(rule, then, when, within_s))
        self._watch_steps()

    def _watch_steps(self) -> None:
        if self._loop is not None:
            trio.lowlevel.add_instrument(self._rules)
        elif self._watch_steps not in self.on_start:
            self.on_start.append(self._watch_steps)

    def _on_batch(self, order: list[Task]) -> None:
        if self.is_unwinding:
            self._unwinding_steps += len(order)
            self._check_unwinding()
            return
        self.steps += len(order)
        self._check_steps(order)
        if self._trace_steps and order:
            add, now_s, label_of = self.trace.add_plain, self._time_s, self._labels.of
            for task in order:
                host, fields = label_of(task)
                add(now_s, host, "step", fields)

    def _check_steps(self, order: list[Task]) -> None:
        if self._time_s != self._instant_s:
            self._instant_s, self._instant_steps = self._time_s, 0
        self._instant_steps += len(order)
        is_still = self._instant_steps > self._instant_steps_max
        if not is_still and self.steps <= self._steps_max:
            return
        runnable = ", ".join(f"{host_of(task)} {task_name(task)}" for task in order)
        said = f"runnable: {runnable}\n{self.waiting()}"
        if is_still:
            still = f"{self._instant_steps_max} task steps while the clock stood at {self._time_s:.6f} s"
            self._fail(Livelock(f"{still}; {said}"))
        else:
            self._fail(StepLimit(f"{self._steps_max} task steps; {said}"))

    def _check_unwinding(self) -> None:
        if self._unwinding_steps > UNWINDING_STEPS_MAX:
            raise StepLimit(f"cancelled tasks do not end\n{self.waiting()}")

    def _progress(self) -> tuple[object, ...] | None:
        """Whose step it is, and what differs after each; None while a checker, maybe slow, judges the run."""
        task = self._running_loop.current_task
        who = f"{current_label()} {task_name(task)}" if task else current_label()
        now = who, task, self.steps, self._unwinding_steps, self.events
        return None if self._is_judging else now

    def _end_step(self, error: EndlessStep) -> None:
        # The task may catch it and go on.
        self.error = self.error or error
        self.after(0, self._fail, error)

    def waiting(self) -> str:
        """One line for each live task: its host, its name, its await stack, innermost first."""
        return await_stacks(self._running_loop.tasks())

    # --- hosts ---------------------------------------------------------------------------------

    def boot(self, name: str, main: Callable[..., Awaitable[object]], *args: Any) -> Host:
        """Start a process on host `name`; an exception that leaves `main` fails the run.

        Power comes back if it was off.
        """
        check_main(main, f"world.boot({name!r}, serve, 7000)")
        host = self.host(name)
        if host.is_running:
            raise ValueError(f"{host} is running")
        self._modules.update(map(module_of, (main, *args)))
        if self._nursery is None:
            raise RuntimeError("the world is not running: boot hosts inside what world.run runs")
        self._graves += host.frozen
        host.frozen = []
        host.generation += 1
        host.stalls = 0
        host.process = Process(host.disk, self._descriptors)
        was_off = host.state is HostState.OFF
        host.state = HostState.UP
        host.scope, host.ended = trio.CancelScope(), trio.Event()
        self.add_row("boot", host=name, generation=host.generation)
        if was_off:
            for call in self.on_power:
                call(host)
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
        except BaseException as error:  # noqa: BLE001 -- run() raises it
            failure, rest = parted(error)
            # What a zombie raises, unwound after the run, is nobody's fault; `sys.exit(0)` is a return.
            is_exit = isinstance(failure, SystemExit) and not failure.code
            if not (failure is None or is_exit or incarnation.is_buried):
                self.fallen = self.fallen or (host.name, standing_for(failure))
                self._fail(failure)
            if rest is not None:  # Cancelled, maybe together with a failure.
                raise rest from None
        if not incarnation.is_buried:
            self._end(host, HostState.DOWN)

    def _end(self, host: Host, state: HostState) -> None:
        host.state = state
        self.add_row(_END_ROWS[state], host=host.name, generation=host.generation)
        self._scheduler.hold_back()
        host.ended.set()
        if host.process is not None and state is not HostState.DOWN:
            host.process.end()
        if state is HostState.OFF:
            host.disk.lose_power()
        for call in self.on_end:
            call(host)

    def stop(self, name: str) -> None:
        """Cancel the host's main function, as a handled SIGTERM would; its cleanup runs."""
        self.add_row("stop", host=name)
        self.aim("stop", name).scope.cancel()

    def kill(self, name: str) -> None:
        """End it as SIGKILL does: no more step of its tasks, no cleanup; its kernel closes its sockets."""
        host = self.aim("kill", name)
        if host.is_running:
            self._end(host, HostState.DEAD)

    def power_off(self, name: str) -> None:
        """End it as a power cut does: no cleanup, and its kernel is silent.

        Peers hear nothing at all until `boot` brings the power back. A host without a process may
        lose its power too.
        """
        host = self.aim("power_off", name)
        if host.state is not HostState.OFF:
            self.power_was_cut = True
            self._end(host, HostState.OFF)

    def pause(self, name: str) -> None:
        """SIGSTOP: none of its tasks takes a step until `resume`; its kernel goes on."""
        host = self.aim("pause", name)
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

    @override
    def _disk_of(self, name: str) -> Disk:
        return Disk(
            name,
            below=self.choices.below,
            tell=self.add_row,
            wall=self.wall,
            stall=partial(self._stall, name),
        )

    def _stall(self, name: str, delay_s: float) -> None:
        """Its process stands in a call of its kernel for so long: none of its tasks takes a step."""
        host = self.host(name)
        if not trio.lowlevel.in_trio_task():
            # In a thread of trio's, whose answer comes as much later.
            sleep_in_thread(delay_s)
        elif delay_s > 0:
            host.stalls += 1
            self._scheduler.hold_back()
            self.after(delay_s, self._call_returned, host, host.generation)

    def _call_returned(self, host: Host, generation: int) -> None:
        if host.generation == generation:
            host.stalls -= 1
            if host.frozen and host.state is HostState.UP:
                self._thaw(host)

    def _thaw(self, host: Host) -> None:
        tasks, host.frozen = host.frozen, []
        self._running_loop.requeue(tasks)

    def task_count(self, name: str) -> int:
        """How many live tasks the host's present incarnation has; its main function is one."""
        host = self.host(name)
        lives = [incarnation_of(task) for task in self.tasks()]
        own = [each for each in lives if each is not None and each.host is host]
        return sum(each.generation == host.generation for each in own)
