"""One simulated process and the machine it runs on.

A host's tasks are known by a context variable that every task inherits from the one that started
it, together with the incarnation it was booted in: what a restarted host's former self left behind
never runs again. Read next: `world.py`, which boots, kills, pauses and resumes hosts.
"""

from __future__ import annotations

import enum
import inspect
from contextvars import ContextVar
from typing import TYPE_CHECKING

import attrs
import trio

from ..disk.disk import Disk
from ..disk.process import Process

if TYPE_CHECKING:
    from trio.lowlevel import Task


DRIVER = "driver"
"""The name of the host that scenario code runs on, outside every booted host."""
WALL_EPOCH_S = 1_700_000_000.0
"""What the wall clock of a host without skew shows at the start, in Unix seconds."""


@attrs.define
class WallClock:
    """One machine's wall clock: off by `skew_s` at `since_s`, gaining `drift` seconds each second."""

    skew_s: float = 0.0
    drift: float = 0.0
    since_s: float = 0.0

    def at(self, time_s: float) -> float:
        """What it shows at virtual time `time_s`, in Unix seconds."""
        return WALL_EPOCH_S + time_s + self.off_by(time_s)

    def off_by(self, time_s: float) -> float:
        """How far it is off at virtual time `time_s`, in seconds."""
        return self.skew_s + (time_s - self.since_s) * self.drift


class HostState(enum.Enum):
    """What the process is doing; its kernel goes on in every state but OFF."""

    DOWN = "down"
    """Not booted yet, or its main function has returned."""
    UP = "up"
    PAUSED = "paused"
    """As after SIGSTOP: sockets fill up, no task takes a step."""
    DEAD = "dead"
    """As after SIGKILL: no cleanup code of it runs inside the simulation."""
    OFF = "off"
    """Without power: as dead, and its kernel is silent too, until the next boot."""


_STEPPING = (HostState.UP, HostState.DOWN)


class Host:
    """One named process. `ended` is set once its main function returned or it was killed."""

    def __init__(self, name: str, disk: Disk) -> None:
        self.name = name
        self.disk = disk
        self.process: Process | None = None
        """The open files of its last life."""
        self.generation = 0
        self.state = HostState.DOWN
        self.wall = WallClock()
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.frozen: list[Task] = []
        """Runnable tasks held back while the host is paused or dead."""
        self.stalls = 0
        """How many calls its process stands in, in its kernel: a slow disk's."""

    @property
    def is_running(self) -> bool:
        """Whether it has a process; a paused one is one."""
        return self.state in (HostState.UP, HostState.PAUSED)

    def __repr__(self) -> str:
        return f"<Host {self.name}.{self.generation} {self.state.value}>"


class Incarnation:
    """One life of a host, from boot to end."""

    __slots__ = ("generation", "host", "label", "process")

    def __init__(self, host: Host) -> None:
        self.host = host
        self.generation = host.generation
        self.label = f"{host.name}.{host.generation}"
        self.process = host.process

    def __str__(self) -> str:
        return self.label

    @property
    def may_run(self) -> bool:
        """Whether tasks of this life may take a step now."""
        host = self.host
        return host.generation == self.generation and host.state in _STEPPING and not host.stalls

    @property
    def is_buried(self) -> bool:
        """Whether this life was ended by a kill or power cut, so that its tasks are zombies."""
        host = self.host
        return host.generation != self.generation or host.state in (
            HostState.DEAD,
            HostState.OFF,
        )


CURRENT: ContextVar[Incarnation | None] = ContextVar("trinamo_sim_host", default=None)
"""Which host the running task belongs to; None for scenario code and events."""


def current_host_name() -> str:
    """The host of the running task, `driver` outside all of them."""
    incarnation = CURRENT.get()
    return DRIVER if incarnation is None else incarnation.host.name


def current_process() -> Process | None:
    """The process of the running task, as its host's disk sees it; None outside all hosts."""
    incarnation = CURRENT.get()
    return None if incarnation is None else incarnation.process


def current_label() -> str:
    """The host and incarnation of the running task, as rows name it."""
    incarnation = CURRENT.get()
    return DRIVER if incarnation is None else incarnation.label


def incarnation_of(task: Task) -> Incarnation | None:
    """Whose task this is; None for scenario code and trio's own tasks."""
    return task.context.get(CURRENT)


def check_main(main: object, example: str) -> None:
    """`TypeError` unless `main` is what a process may begin with; `example` is how it is given."""
    if inspect.iscoroutine(main):
        main.close()
        raise TypeError(
            f"give the function itself and its arguments, as in {example}: this is a call"
        )
    if not callable(main):
        raise TypeError(f"give an async function, as in {example}; this is a {type(main).__name__}")
