"""Standard output and standard error of a process that serves: nobody waits for their reader.

A pipe that is not read, a terminal that is stopped, a supervisor under Ctrl-Z: a plain `write` to
them waits, and with it the loop and every request. Here a thread does the writing, from a buffer
with a bound. What finds no room drops the oldest lines, and a line tells how many once somebody
reads again. A thread, not O_NONBLOCK: that flag belongs to the open file, which other processes
share (`docs/decisions/0014-output-by-a-thread.md`).

A disk without room is such a reader, too: what finds none is written once there is some again.

At the process's end the last lines, the cause of a crash among them, get `EXIT_S` to be taken.
"""

from __future__ import annotations

import atexit
import errno
import io
import logging
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from trinamo.runtime.logs.setup import LogHandler
from trinamo.runtime.metrics.metrics import Metrics

BUFFER_BYTES_MAX: Final = 256 << 10
LINE_BYTES: Final = 64
"""What a line takes beyond its bytes."""
PIECE_BYTES: Final = 4096
"""What a pipe takes whole, so that lines of several writers do not mix (PIPE_BUF)."""
EXIT_S: Final = 1.0


NO_ROOM_S: Final = 0.5
"""How often a disk that was full is tried again."""
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_LOSS: Final = "%d lines were dropped, because nobody read them, or their disk was full"


class TextOutput(io.TextIOBase):
    """A text stream on a descriptor whose writers never wait.

    Lines are whole: one that is dropped is dropped whole. `tell_loss` makes the line about losses.
    """

    def __init__(self, fd: int, *, bytes_max: int = BUFFER_BYTES_MAX) -> None:
        super().__init__()
        self._fd = fd
        self._bytes_max = bytes_max
        self._partial = ""
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._untold = 0
        self._is_writing = False
        self._is_broken = False
        self._is_closing = False
        # Reentrant: a signal handler or a finalizer may write while its thread is in here.
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self.lines_dropped = 0
        """Lines that nobody will see, ever."""
        self.tell_loss: Callable[[int], str] = lambda count: f"{_LOSS % count}\n"

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Text is written as UTF-8."""
        return "utf-8"

    def fileno(self) -> int:
        """The descriptor written to."""
        return self._fd

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._fd)

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, text: str, /) -> int:
        """Take text; whole lines of it will be written, the rest with `flush`."""
        with self._changed:
            head, end, tail = text.rpartition("\n")
            if end:
                self._put(f"{self._partial}{head}{end}")
                self._partial = ""
            self._partial += tail
            if len(self._partial) > PIECE_BYTES:
                self.flush()
        return len(text)

    def flush(self) -> None:
        """Let what is no whole line be written, too. Waits for nothing."""
        with self._changed:
            if self._partial:
                self._put(self._partial)
                self._partial = ""

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is written, at most so long; whether it is."""
        self.flush()
        with self._changed:
            return self._changed.wait_for(
                lambda: self._is_broken or not (self._lines or self._untold or self._is_writing),
                timeout_s,
            )

    def close(self) -> None:
        """End the thread once it has written what it has; the descriptor stays open."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def _put(self, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")
        if self._is_broken:
            self.lines_dropped += _count_lines(data)
            return
        self._lines.append(data)
        self._bytes += len(data) + LINE_BYTES
        while self._bytes > self._bytes_max and len(self._lines) > 1:
            oldest = self._lines.popleft()
            self._bytes -= len(oldest) + LINE_BYTES
            self._untold += _count_lines(oldest)
            self.lines_dropped += _count_lines(oldest)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="output", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while (piece := self._next()) is not None:
            if not self._write_whole(piece):
                with self._changed:
                    # Whoever read has gone for good; what follows is only counted.
                    self._is_broken = True
                    self.lines_dropped += sum(map(_count_lines, self._lines))
                    self._lines.clear()
                    self._changed.notify_all()
                return

    def _next(self) -> bytes | None:
        """What to write now, once there is something; None at the end."""
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._lines or self._is_closing)
            if not self._lines:
                return None
            self._is_writing = True
            piece = bytearray()
            if self._untold:
                piece += self.tell_loss(self._untold).encode("utf-8", "backslashreplace")
                self._untold = 0
            while self._lines and (not piece or len(piece) + len(self._lines[0]) <= PIECE_BYTES):
                line = self._lines.popleft()
                self._bytes -= len(line) + LINE_BYTES
                piece += line
            return bytes(piece)

    def _write_whole(self, data: bytes) -> bool:
        """Write all of it, however long it takes; False if it cannot be written."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                # Another process has set O_NONBLOCK on the file that we share with it.
                waiting = select.poll()
                waiting.register(self._fd, select.POLLOUT)
                waiting.poll()
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    return False
                with self._changed:
                    if self._changed.wait_for(lambda: self._is_closing, NO_ROOM_S):
                        return False
        return True


def _count_lines(data: bytes) -> int:
    return data.count(b"\n") or 1


_outputs: list[TextOutput] = []


def unblock_output() -> None:
    """Let this process's `sys.stdout` and `sys.stderr` be `TextOutput`s from now on; once is enough.

    If both are the same file they become one object, so that their lines keep their order.
    """
    if _outputs:
        return
    error, output = sys.stderr, sys.stdout
    for stream in (output, error):
        stream.flush()
    sys.stderr = TextOutput(error.fileno())
    is_same = os.path.sameopenfile(error.fileno(), output.fileno())
    sys.stdout = sys.stderr if is_same else TextOutput(output.fileno())
    _outputs.extend([sys.stderr] if is_same else [sys.stderr, sys.stdout])

    def leave() -> None:
        # First, for it tells what was held back; registered before us it would come after.
        logging.shutdown()
        for each in _outputs:
            each.drain(EXIT_S)

    atexit.register(leave)


def show_losses(metrics: Metrics) -> None:
    """Show how many lines of this process's log nobody sees, by why.

    `flood`: held back as too many of a kind; `unread`: dropped for want of a reader.
    """
    handlers = logging.getLogger().handlers
    gates = [each.gate for each in handlers if isinstance(each, LogHandler)]
    metrics.readings(
        "log_lines_",
        ("reason",),
        lambda _: [
            (("flood",), {"lost": sum(gate.held_back for gate in gates)}),
            (("unread",), {"lost": sum(each.lines_dropped for each in _outputs)}),
        ],
        counters={"lost": "Lines of the log that were not written"},
    )


def tell_losses(handler: LogHandler) -> None:
    """Let the lines about losses have the form of the log that goes the same way."""

    def told(count: int) -> str:
        record = logging.LogRecord(
            "trinamo.log", logging.WARNING, __file__, 0, _LOSS, (count,), None
        )
        return handler.format(record) + "\n"

    stream: object = handler.stream
    for output in _outputs:
        if output is stream:
            output.tell_loss = told
