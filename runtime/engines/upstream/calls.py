"""The requests under way at one upstream, and what ends them besides their answers."""

from __future__ import annotations

from types import TracebackType

import attrs
import trio

from ...config.upstream import UpstreamConfig
from ...context import Context, State
from ...errors import DisconnectedError

__all__ = ["Call", "Calls"]


@attrs.define(eq=False)
class Call:
    """One request under way, as the watch over stalls sees it."""

    scope: trio.CancelScope
    heard_at: float
    is_begun: bool = False
    is_paused: bool = False
    is_stalled: bool = False

    def heard(self) -> None:
        self.heard_at = trio.current_time()


class Calls:
    """Those of one upstream; `watch` gives up the ones that bring nothing."""

    def __init__(self, section: UpstreamConfig) -> None:
        self._section = section
        self._calls: dict[Call, None] = {}

    def call(self, context: Context) -> Calling:
        """A scope that Stop, Kill and a stall leave; whoever leaves it early asks `left` why."""
        return Calling(self._calls, context)

    async def left(self, call: Call) -> None:
        """Return if the scope of `call` was left by Stop; `DisconnectedError` if it stalled."""
        if call.is_stalled:
            said = "its answer" if call.is_begun else "the beginning of its answer"
            raise DisconnectedError(f"the upstream has stalled in {said}")
        # A kill cancels the scope around this, too.
        await trio.lowlevel.checkpoint()

    async def watch(self) -> None:
        """Look at all of them four times in the shorter limit, until cancelled."""
        section = self._section
        pause_s = min(section.stall_timeout_s, section.first_byte_timeout_s) / 4
        while True:
            await trio.sleep(pause_s)
            now = trio.current_time()
            for call in self._calls:
                limit_s = section.stall_timeout_s if call.is_begun else section.first_byte_timeout_s
                if call.is_paused:
                    call.heard_at = now
                elif now - call.heard_at > limit_s:
                    call.is_stalled = True
                    call.scope.cancel()


class Calling:
    """See `Calls.call`."""

    __slots__ = ("_call", "_calls", "_context")

    def __init__(self, calls: dict[Call, None], context: Context) -> None:
        self._calls, self._context = calls, context
        self._call = Call(trio.CancelScope(), trio.current_time())

    def __enter__(self) -> Call:
        self._calls[self._call] = None
        self._context.on_change(self._cancel)
        self._call.scope.__enter__()
        return self._call

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        del self._calls[self._call]
        self._context.off_change(self._cancel)
        return bool(self._call.scope.__exit__(exc_type, exc, traceback))

    def _cancel(self, _: State) -> None:
        self._call.scope.cancel()
