"""Work that a plane may refuse and that is tried again for as long as the process lives.

For what runs beside the requests, such as a watch: a process serves on without it, so a refusal
neither ends it nor is asked for again at once. An outage is not for here: planes wait for its end.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from ..errors import TrinamoError

PAUSE_MIN_S: Final = 0.5
PAUSE_MAX_S: Final = 30.0


class Retries:
    """Growing pauses between the tries of one thing, and one line in the log for each new cause."""

    def __init__(self, logger: logging.Logger, what: str) -> None:
        self._logger = logger
        self._what = what
        self._pause_s = PAUSE_MIN_S
        self.cause = ""
        """Why the last try failed; empty once one has succeeded."""

    async def run(
        self,
        attempt: Callable[[Callable[[], None]], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Call `attempt(begun)` until it returns; a `TrinamoError` of it is told and waited out.

        It calls `begun` at each sign that it works. Started with the first of them, or with the
        first failure: nobody's start waits for a refusal to be taken back.
        """
        is_started = False

        def start() -> None:
            nonlocal is_started
            if not is_started:
                is_started = True
                task_status.started()

        def begun() -> None:
            if self.cause:
                self._logger.info("%s: no longer so", self._what)
                self.cause = ""
            self._pause_s = PAUSE_MIN_S
            start()

        while True:
            try:
                return await attempt(begun)
            except TrinamoError as error:
                if error.message != self.cause:
                    self.cause = error.message
                    said = "%s: %s; trying on"
                    self._logger.error(said, self._what, self.cause)  # noqa: TRY400 -- it says it all
                start()
            pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, PAUSE_MAX_S)
            await trio.sleep(pause_s)
