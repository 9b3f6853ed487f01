"""One child process of `trinamo up` or `trinamo frontend`, from start to end.

It is started, listened to, started again if it crashes, and ended.

A child is `python -m trinamo.cli <role>` in a process group of its own, so that Ctrl-C at the
terminal reaches only `up`, which drains in order. It dies with `up` whatever kills that
(`readiness.bind_to_parent`). Its output comes line by line, its facts over the ready pipe.
"""

from __future__ import annotations

import enum
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

import trio

from trinamo.runtime.errors import ConfigError, TrinamoError, UnavailableError
from trinamo.runtime.nurseries import open_nursery
from trinamo.transports.servers.process import signal_group, terminate, wait_exit

from .readiness import LINE_BYTES_MAX, parse_line

PAUSE_MIN_S: Final = 0.2
PAUSE_MAX_S: Final = 10.0
STEADY_S: Final = 30.0
"""A child that served this long before it crashed is started again without a longer pause."""
OUTPUT_GRACE_S: Final = 1.0
"""How long after a child's end its last lines are waited for."""
END_MARGIN_S: Final = 3.0
"""What a child gets beyond the deadlines of its own shutdown before it is killed."""


class ChildState(enum.StrEnum):
    """What `up` shows of a child."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    RESTARTING = "restarting"
    GONE = "gone"


class Child:
    """One supervised process. `facts` is what it announced when it became ready.

    `on_line` gets each line of its output, which without it goes where ours goes; `on_event` gets
    each fact about its life as a sentence. Both are synchronous.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        *,
        on_line: Callable[[str, str], None] | None,
        on_event: Callable[[str], None],
    ) -> None:
        self.name = name
        self.environ = dict(environ)
        self.state = ChildState.STARTING
        self.facts: dict[str, Any] = {}
        self.restarts = 0
        self.is_silent = False
        """Whether it runs but does not answer (`hangs.py`)."""
        self._arguments = tuple(arguments)
        self._on_line = on_line
        self._on_event = on_event
        self._process: subprocess.Popen[bytes] | None = None
        self._end_asked = trio.Event()
        self._was_ready = False
        self._failure: TrinamoError | None = None
        self._words = ""
        self._settled = trio.Event()
        self._gone = trio.Event()

    @property
    def pid(self) -> int:
        """Its process id; 0 while it is down."""
        process = self._process
        return 0 if process is None or process.poll() is not None else process.pid

    async def wait_ready(self) -> None:
        """Return once it serves; raises what kept it from serving the first time."""
        await self._settled.wait()
        if self._failure is not None:
            raise self._failure

    async def run(self) -> None:
        """Start it, and again whenever it ends unasked; cancelled, it is killed.

        Returns after `end`, or when it could not be started the first time.
        """
        pause_s = PAUSE_MIN_S
        try:
            while not self._end_asked.is_set():
                started_at = trio.current_time()
                ending = await self._run_once()
                if self._end_asked.is_set():
                    break
                if not self._was_ready:
                    why = self._failure or UnavailableError(f"{ending} before it was ready")
                    kind = ConfigError if isinstance(why, ConfigError) else UnavailableError
                    self._failure = kind(f"{self.name} did not start: {why.message}")
                    break
                self.state = ChildState.RESTARTING
                if trio.current_time() - started_at >= STEADY_S:
                    pause_s = PAUSE_MIN_S
                # What it said of its end over the ready pipe, which is read whatever its log does.
                words = f" ({self._words})" if self._words else ""
                self._words = ""
                self._on_event(f"{self.name} {ending}{words}; starting it again in {pause_s:g} s")
                with trio.move_on_after(pause_s):
                    await self._end_asked.wait()
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
                self.restarts += 1
        finally:
            self.state = ChildState.GONE
            self._settled.set()
            self._gone.set()

    async def end(self, *, grace_s: float) -> bool:
        """Ask it to go and wait; after `grace_s` it is killed. Whether it went by itself."""
        self._end_asked.set()
        if self.pid:
            self.state = ChildState.DRAINING
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)
        with trio.move_on_after(grace_s) as waiting:
            await self._gone.wait()
        if waiting.cancelled_caught:
            self._signal(signal.SIGKILL)
            await self._gone.wait()
        return not waiting.cancelled_caught

    async def replace(self, *, grace_s: float) -> None:
        """End the process that runs now, killed after `grace_s`; `run` starts another one."""
        if self._process is not None:
            await terminate(self._process, grace_s=grace_s)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            signal_group(self._process, number)

    async def _run_once(self) -> str:
        """Start it and wait for its end; returns how it ended, in words."""
        try:
            process, output, news = self._spawn()
        except OSError as error:
            # Without memory, processes or descriptors now, the others serve on.
            return f"cannot be started ({error.strerror})"
        self._process = process
        async with output, news:
            try:
                async with open_nursery() as nursery:
                    if self._on_line is not None:
                        nursery.start_soon(self._read_output, output, self._on_line)
                    nursery.start_soon(self._read_news, news)
                    status = await wait_exit(process)
                    # A grandchild may hold the pipes open after the child has gone.
                    nursery.cancel_scope.deadline = trio.current_time() + OUTPUT_GRACE_S
            finally:
                signal_group(process, signal.SIGKILL)
                process.wait()  # A killed process is gone within a moment; this is no I/O.
        return _ending(status)

    def _spawn(
        self,
    ) -> tuple[subprocess.Popen[bytes], trio.lowlevel.FdStream, trio.lowlevel.FdStream]:
        output, output_end = os.pipe()
        news, news_end = os.pipe()
        # -P: a file in the current folder must not pass for a module of the standard library.
        command = [sys.executable, "-P", "-m", "trinamo.cli", *self._arguments]
        command += ["--ready-fd", str(news_end), "--parent", str(os.getpid())]
        try:
            process = subprocess.Popen(  # noqa: S603 -- the command is ours
                command,
                stdin=subprocess.DEVNULL,
                stdout=None if self._on_line is None else output_end,
                stderr=None if self._on_line is None else output_end,
                pass_fds=(news_end,),
                env=self.environ,
                process_group=0,
            )
        except BaseException:
            os.close(output)
            os.close(news)
            raise
        finally:
            os.close(output_end)
            os.close(news_end)
        return process, trio.lowlevel.FdStream(output), trio.lowlevel.FdStream(news)

    async def _read_output(
        self, output: trio.lowlevel.FdStream, on_line: Callable[[str, str], None]
    ) -> None:
        async for line in _lines(output):
            text = line.decode(errors="replace").rstrip()
            if text:
                on_line(self.name, text)

    async def _read_news(self, news: trio.lowlevel.FdStream) -> None:
        async for line in _lines(news):
            match parse_line(line):
                case ("ready", facts):
                    self.facts = facts
                    if not self._end_asked.is_set():
                        self.state = ChildState.READY
                    if self._was_ready:
                        self._on_event(f"{self.name} is back")
                    self._was_ready = True
                    self._settled.set()
                case ("error", facts):
                    kind = ConfigError if facts.get("code") == "config" else UnavailableError
                    self._words = str(facts.get("message", ""))
                    if not self._was_ready:
                        self._failure = kind(self._words)
                case _:
                    pass  # Nothing else is said there, and a stray line harms nobody.


def _ending(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


async def _lines(stream: trio.lowlevel.FdStream) -> AsyncIterator[bytes]:
    """Lines without their ends; one longer than `LINE_BYTES_MAX` comes in pieces."""
    buffer = bytearray()
    async for data in stream:
        buffer += data
        while (at := buffer.find(b"\n")) >= 0:
            yield bytes(buffer[:at])
            del buffer[: at + 1]
        if len(buffer) >= LINE_BYTES_MAX:
            yield bytes(buffer)
            buffer.clear()
    if buffer:
        yield bytes(buffer)


# --- several at once ---


async def wait_all_ready(children: Sequence[Child]) -> None:
    """Return once all serve; raises what kept the first of them from it."""
    async with open_nursery() as nursery:
        for child in children:
            nursery.start_soon(child.wait_ready)


async def end_all(children: Sequence[Child], grace_s: float, say: Callable[[str], None]) -> None:
    """Ask all to go, each of which needs at most `grace_s`; say how each of them went."""

    async def end(child: Child) -> None:
        started_at = trio.current_time()
        if await child.end(grace_s=grace_s + END_MARGIN_S):
            took_s = trio.current_time() - started_at
            say(f"{child.name} has ended ({took_s:.1f} s)")
        else:
            say(f"{child.name} did not end in time and was killed")

    async with open_nursery() as nursery:
        for child in children:
            nursery.start_soon(end, child)
