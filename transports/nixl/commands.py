"""What the NIXL thread is asked to do: a queue with an end, after which nobody waits in vain."""

from __future__ import annotations

import logging
import queue
import threading
from typing import Protocol

from trinamo.runtime.errors import DisconnectedError, TransferError, TrinamoError

_log = logging.getLogger("trinamo.nixl")


class Command(Protocol):
    """One thing to do."""

    def __call__(self, *, is_served: bool) -> None:
        """Do it or, where there is no thread any more, say so to whoever waits."""


class Commands:
    """Put from any thread, taken by one."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()
        # Held only to put a command, or to say that there is nobody to take it any more.
        self._gate = threading.Lock()
        self._has_ended = False

    def put(self, command: Command) -> None:
        """Have it done by the thread; told at once, here, if that has ended."""
        with self._gate:
            if not self._has_ended:
                self._queue.put(command)
                return
        command(is_served=False)

    def take(self, timeout_s: float) -> Command | None:
        """The next one; None if none comes in time. 0 does not wait."""
        try:
            return self._queue.get(timeout=timeout_s) if timeout_s else self._queue.get_nowait()
        except queue.Empty:
            return None

    def obey(self, command: Command) -> None:
        """Do one; what it raises is logged, and no other's business."""
        try:
            command(is_served=True)
        except Exception:  # noqa: BLE001 -- the next one is somebody else's
            _log.exception("a call of NIXL failed, and nobody waits for it")

    def end(self) -> None:
        """There is no thread any more: whoever waits is told, now and from now on."""
        with self._gate:
            self._has_ended = True
        while (command := self.take(0)) is not None:
            command(is_served=False)


def wake_up(*, is_served: bool) -> None:
    """A command that does nothing."""


def as_ours(error: Exception) -> TrinamoError:
    """A library's or a device's error as one of ours."""
    if isinstance(error, TrinamoError):
        return error
    return TransferError(f"{type(error).__name__}: {error}")


def ended() -> TrinamoError:
    """What is said when there is no thread any more."""
    return DisconnectedError("the thread that calls NIXL has ended")
