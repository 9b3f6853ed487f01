"""Keeps a run closed: whatever would make two runs of one seed differ is replaced or refused.

Time and dice are the run's (`ambient.py`), and so are trio's threads (`threads.py`). Others, real
sockets, name look-ups and subprocesses always raise. The collector of cyclic garbage is off, because when it comes depends on what went before.

This file and `threads.py` are the only ones that touch trio's private names. `check_trio` proves that they are where
they should be, and do what they should, before anything relies on them.
"""

from __future__ import annotations

import _thread
import gc
import math
import random
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import trio
from trio import _socket as trio_socket
from trio._core import _run as trio_run
from trio._core._run import GLOBAL_RUN_CONTEXT
from typing_extensions import override

from ..disk import calls
from ..disk.calls import FILE_EVENTS
from ..errors import EndlessStep, Escape, StepLimit, UnsupportedTrio
from .ambient import Ambient, Patch, early_bound, in_utc, stand_ins, unbind
from .escapes import escape_of
from .threads import Function, Later, Threads
from .tls import Tls

if TYPE_CHECKING:
    from trio.lowlevel import Task

TrioSocket = trio_socket._SocketType  # noqa: SLF001 -- a class of ours is one of those
_REFUSED_EVENTS = (
    "socket.",
    "_thread.start_new_thread",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.fork",
    "os.kill",
    "os.posix_spawn",
    "os.spawn",
)
_trap: Callable[[str], None] | None = None
"""What the audit hook calls with a refused event; None outside runs."""
Outside = Callable[[str, tuple[Any, ...]], str | None]
_outside: Outside = lambda *_: None  # noqa: E731


def _audit(event: str, args: tuple[Any, ...]) -> None:
    # Numeric look-ups are made by trio itself and reach no network; others are refused by the
    # stand-in for socket.getaddrinfo.
    if _trap is None:
        return
    if event == "_thread.start_new_thread" and isinstance(
        getattr(args[0], "__self__", None), Function
    ):
        return
    if event.startswith(_REFUSED_EVENTS) and event != "socket.getaddrinfo":
        _trap(f"{event} {args!r:.100}")
    elif event in FILE_EVENTS and (what := _outside(event, args)):
        _trap(what)


@cache
def _install_audit_hook() -> None:
    # An audit hook can never be removed, so there is one for all runs, and a switch.
    sys.addaudithook(_audit)


def escape(what: str) -> NoReturn:
    """End the run with an `Escape`, for `what` reaches for the real world."""
    assert _trap is not None, "outside of runs nothing is refused"
    _trap(what)
    raise AssertionError


@contextmanager
def armed(on_escape: Callable[[Escape], None], outside: Outside) -> Iterator[None]:
    """Refuse real sockets, threads and processes inside; entered once trio's loop has its own.

    `outside` says what an audit event did with real files that it may not, if it did.
    """
    global _trap, _outside

    def trap(what: str) -> None:
        escape = escape_of(what, "the simulated code reached for the real world: ")
        on_escape(escape)
        raise escape

    _install_audit_hook()
    _trap, _outside = trap, outside
    try:
        yield
    finally:
        # A loop that broke never gets here; what is left of its tasks may, in the middle of the next.
        if _trap is trap:
            _trap = None


@contextmanager
def breakable(
    loop: Callable[[], Loop], on_stuck: Callable[[BaseException], None]
) -> Iterator[None]:
    """A limit that is met inside trio's loop goes to `on_stuck`, and leaves nothing behind.

    So ends a run whose tasks do not end when they are cancelled. What they say when they are thrown
    away is lost: they find no loop any more.
    """
    global _trap
    is_stuck = False
    try:
        yield
    except trio.TrioInternalError as error:
        _trap = None
        if not isinstance(error.__cause__, (StepLimit, EndlessStep)):
            raise
        # With its traceback it would keep all of them.
        on_stuck(error.__cause__.with_traceback(None))
        is_stuck = True
    if is_stuck:
        with replaced((sys, "unraisablehook", lambda _: None)):
            loop().abandon()
            gc.collect()


@contextmanager
def replaced(*patches: Patch) -> Iterator[list[Patch]]:
    """Put each stand-in in place, and back afterwards what was there, which is given.

    As `unittest.mock.patch.object`, which takes a tenth of a second to import. Raises `UnsupportedTrio`
    where there is nothing to replace.
    """
    before: list[Patch] = []
    for owner, name, _ in patches:
        try:
            before.append((owner, name, getattr(owner, name)))
        except (AttributeError, KeyError):
            version = sys.version.partition(" ")[0]
            raise _moved(f"under Python {version} there is no {name} in {owner}") from None
    try:
        for owner, name, stand_in in patches:
            setattr(owner, name, stand_in)
        yield before
    finally:
        for owner, name, real in reversed(before):
            setattr(owner, name, real)


@contextmanager
def closed_world(
    scheduler: object,
    *,
    ambient: Ambient,
    wall: Callable[[], float],
    now: Callable[[], float],
    stream: Callable[[str], random.Random],
    later: Later,
    advise: Callable[[str], None],
    on_escape: Callable[[Escape], None],
) -> Iterator[None]:
    """Put the stand-ins in place for one run, and everything back as it was afterwards."""
    check_trio()

    def refuse(what: str) -> Callable[..., Any]:
        def refused(*_args: Any, **_keywords: Any) -> Any:
            escape = escape_of(what)
            on_escape(escape)
            raise escape

        return refused

    patches: list[Patch] = [
        (trio_run, "_r", scheduler),
        (trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
        (threading.Thread, "start", refuse("threading.Thread.start")),
        (_thread, "start_new_thread", refuse("_thread.start_new_thread")),
        (trio, "run_process", refuse("trio.run_process")),
        (trio.lowlevel, "open_process", refuse("trio.lowlevel.open_process")),
        (socket, "getaddrinfo", _numeric_only(refuse("socket.getaddrinfo for a name"))),
    ]
    dice_before = random.getstate()
    collected = gc.isenabled()
    # When a collection comes depends on what the process did before, and it runs finalisers.
    gc.disable()
    threads = Threads(later, refuse)
    patches += threads.stand_ins()
    patches += Tls(stream, wall, advise).stand_ins()
    rng = stream("ambient")
    patches += stand_ins(ambient, wall=wall, now=now, rng=rng, refuse=refuse)
    patches += calls.stand_ins()
    patches += [*early_bound(patches)]
    random.seed(rng.getrandbits(64))
    before: list[Patch] = []
    try:
        with in_utc(), replaced(*patches) as before:
            try:
                yield
            finally:
                threads.close()
    finally:
        unbind({id(put[2]): real for put, (_, _, real) in zip(patches, before, strict=False)})
        random.setstate(dice_before)
        if collected:
            gc.enable()


def _numeric_only(refused: Callable[..., Any]) -> Callable[..., Any]:
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *args: int, **keywords: int) -> Any:
        flags = keywords.get("flags", args[3] if len(args) > 3 else 0)
        if host is None or flags & socket.AI_NUMERICHOST:
            return real(host, port, *args, **keywords)
        return refused()

    return getaddrinfo


# --- trio's private parts -----------------------------------------------------------------------


def task_number(task: Task) -> int:
    """The place of `task` in the order of creation, counted over all runs of the process."""
    return task._counter  # noqa: SLF001 -- checked by check_trio


def trio_seams(
    socket_type: type[TrioSocket],
    wait_readable: Callable[[Any, Any], Awaitable[None]],
    wait_writable: Callable[[Any, Any], Awaitable[None]],
    notify_closing: Callable[[Any, Any], None],
) -> list[Patch]:
    """What has to be replaced for trio to make its sockets of `socket_type` and wait for them so.

    Waiting is replaced where trio's own functions look it up, so that whoever bound those early is served too.
    They are called with trio's I/O manager and the socket or its number. trio's wake-up pair, the only real
    sockets there are in a run, waits as before.
    """
    manager, kernels = type(GLOBAL_RUN_CONTEXT.runner.io_manager), socket.socket
    real = manager.wait_readable

    def wait_readable_or_woken(io_manager: Any, fd: Any) -> Awaitable[None]:
        return (real if type(fd) is kernels else wait_readable)(io_manager, fd)

    return [
        (trio_socket, "_SocketType", socket_type),
        (manager, "wait_readable", wait_readable_or_woken),
        (manager, "wait_writable", wait_writable),
        (manager, "notify_closing", notify_closing),
    ]


class Loop:
    """The running trio loop, as far as the world must look into it."""

    def __init__(self) -> None:
        self._runner = GLOBAL_RUN_CONTEXT.runner

    @property
    def has_idle_waiter(self) -> bool:
        """Whether a task sits in `trio.testing.wait_all_tasks_blocked`."""
        return bool(self._runner.waiting_for_idle)

    @property
    def has_pending_callback(self) -> bool:
        """Whether `run_sync_soon` was called and its callback has not run."""
        return self._runner.entry_queue.size() > 0

    @property
    def current_task(self) -> Task | None:
        """The task whose step it is; None between steps, and in a function of a simulated thread."""
        return vars(GLOBAL_RUN_CONTEXT).get("task")

    @property
    def next_deadline(self) -> float:
        """Trio's next deadline, in seconds of its clock; infinite if there is none."""
        return self._runner.deadlines.next_deadline()

    def requeue(self, tasks: list[Task]) -> None:
        """Put back runnable tasks that the scheduler had taken out."""
        self._runner.runq.extend(tasks)

    def may_run(self, task: Task) -> bool:
        """Whether the task is to take a step, and waits for nothing."""
        return task in self._runner.runq

    def tasks(self) -> list[Task]:
        """All live tasks, oldest first."""
        return sorted(self._runner.tasks, key=task_number)

    def abandon(self) -> None:
        """After the loop broke: throw its tasks away."""
        for task in self.tasks():
            with suppress(Exception, BaseExceptionGroup, Escape, EndlessStep):
                task.coro.close()
            for nursery in task.child_nurseries:
                nursery._children.clear()  # noqa: SLF001 -- or it says that they live
        self._runner.tasks.clear()


class _Probe(trio.abc.Clock):
    """Clock and dice of a tiny run that records how trio uses them."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.asked: list[float] = []
        self.batches: list[list[int]] = []
        self.order: list[int] = []
        self.has_put_back = False
        self.used: list[str] = []

    @override
    def start_clock(self) -> None:
        pass

    @override
    def current_time(self) -> float:
        return self.time_s

    @override
    def deadline_to_sleep_time(self, deadline: float) -> float:
        if deadline != math.inf:
            self.asked.append(deadline)
            self.time_s = deadline
        return 0

    def shuffle(self, batch: list[Task]) -> None:
        self.batches.append([task_number(task) for task in batch])
        if len(batch) >= 4 and not self.has_put_back:
            self.has_put_back = True
            Loop().requeue([batch.pop()])
        batch.reverse()

    def random(self) -> float:
        raise _moved("batches are not shuffled in deterministic mode")

    async def main(self) -> None:
        async def child(number: int) -> None:
            self.order.append(number)

        await trio.sleep(5)
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(child, number)
        loop = Loop()
        assert not loop.has_idle_waiter
        assert not loop.has_pending_callback
        assert loop.next_deadline == math.inf
        with trio.move_on_after(7):
            assert loop.next_deadline == self.time_s + 7
            await trio.lowlevel.checkpoint()
        assert trio.lowlevel.current_task() in loop.tasks()
        assert loop.current_task is trio.lowlevel.current_task()
        loop.requeue([])
        await self._use_sockets()

    async def _use_sockets(self) -> None:
        """Let trio wrap a socket, try, wait and close it, all of which is noted."""

        async def wait(_manager: Any, fd: Any) -> None:
            self.used.append(f"wait for {fd}")

        class Socket(TrioSocket):
            async def _nonblocking_helper(
                self,
                wait_fn: Any,  # noqa: ARG002 -- trio's name
                fn: Any,
                *_args: Any,
                **_keywords: Any,
            ) -> Any:
                return fn.__name__

            def __init__(self, sock: Any) -> None:
                self._sock, self._did_shutdown_SHUT_WR = sock, False

        def notify(_manager: Any, fd: Any) -> None:
            self.used.append(f"close {fd}")

        with replaced(*trio_seams(Socket, wait, wait, notify)):
            await trio.lowlevel.wait_readable(1)
            await trio.lowlevel.wait_writable(2)
            trio.lowlevel.notify_closing(3)
            made: Any = trio.socket.from_stdlib_socket(SimpleNamespace(family=0))  # type: ignore[arg-type]
            self.used += [type(made).__name__, await made.recv(1), await made.send(b"")]
            self.used.append(str(made.family))

    def findings(self) -> Iterator[str]:
        if self.asked != [5.0]:
            yield "the clock is not asked exactly once when nothing can run"
        if not any(len(batch) >= 4 for batch in self.batches):
            yield "batches are not shuffled as a whole"
        if any(batch != sorted(batch) for batch in self.batches):
            yield "batches are not sorted by creation before they are shuffled"
        if self.has_put_back and 3 not in self.order:
            yield "a task put back while a batch is shuffled does not run with the next one"
        if self.order != [0, 1, 2, 3]:
            yield "a batch is not worked through from its end after it was shuffled"
        if self.used != ["wait for 1", "wait for 2", "close 3", "Socket", "recv", "send", "0"]:
            yield f"sockets are not made, used or waited for as they were: {self.used}"


@cache
def check_trio() -> None:
    """Prove that trio still has, and uses, what the simulator stands in for.

    Raises `UnsupportedTrio` naming the release and what moved. Runs once per process.
    """
    for name in ("_r", "_ALLOW_DETERMINISTIC_SCHEDULING"):
        if not hasattr(trio_run, name):
            raise _moved(f"trio._core._run.{name} is gone")
    probe = _Probe()
    with (
        replaced((trio_run, "_r", probe), (trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)),
    ):
        try:
            trio.run(probe.main, clock=probe)
        except (AttributeError, AssertionError, trio.TrioInternalError) as error:
            raise _moved(f"{error!r}, caused by {error.__cause__!r}") from error
    for finding in probe.findings():
        raise _moved(finding)


def _moved(what: str) -> UnsupportedTrio:
    return UnsupportedTrio(f"trio {trio.__version__}: {what}")
