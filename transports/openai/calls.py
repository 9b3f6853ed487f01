"""The requests under way at one upstream, and what ends them besides their answers."""

from __future__ import annotations

from typing import Any

import attrs
import trio

from trinamo.runtime.config.upstream import UpstreamConfig
from trinamo.runtime.context import Context, State
from trinamo.runtime.errors import DisconnectedError, SilentError


@attrs.define(eq=False)
class UpstreamCall:
    """One request under way, as the watch over stalls sees it."""

    scope: trio.CancelScope
    heard_at: float
    """When the last byte came."""
    brought_at: float
    """When the last part of the answer did: its head, or an event."""
    is_begun: bool = False
    is_paused: bool = False
    error: DisconnectedError | None = None
    """Why it was given up."""

    def heard(self) -> None:
        self.heard_at = trio.current_time()

    def fail(self, error: DisconnectedError) -> None:
        """Give it up: its scope is left, and `Calls.left` raises `error`."""
        self.error = error
        self.scope.cancel()


class Calls:
    """Those of one upstream; `watch` gives up the ones that bring nothing."""

    def __init__(self, section: UpstreamConfig) -> None:
        self._section = section
        self._calls: dict[UpstreamCall, None] = {}

    def call(self, context: Context) -> Calling:
        """A scope that Stop, Kill and `UpstreamCall.fail` leave; whoever leaves it early awaits `left`."""
        return Calling(self._calls, context)

    async def left(self, call: UpstreamCall) -> None:
        """Return if the scope of `call` was left by Stop; raise why it was given up."""
        if call.error is not None:
            raise call.error
        # A kill cancels the scope around this, too.
        await trio.lowlevel.checkpoint()

    async def watch(self) -> None:
        """Look at all of them four times in the shorter limit, until cancelled."""
        section = self._section
        patience_s = section.first_byte_timeout_s
        pause_s = min(section.stall_timeout_s, patience_s) / 4
        while True:
            await trio.sleep(pause_s)
            now = trio.current_time()
            for call in self._calls:
                limit_s = section.stall_timeout_s if call.is_begun else patience_s
                if call.is_paused:
                    call.heard_at = call.brought_at = now
                elif now - call.heard_at > limit_s or now - call.brought_at > patience_s:
                    said = "its answer" if call.is_begun else "the beginning of its answer"
                    call.fail(SilentError(f"the upstream has stalled in {said}"))


class Calling:
    """See `Calls.call`."""

    __slots__ = ("_calls", "call", "context")

    def __init__(self, calls: dict[UpstreamCall, None], context: Context) -> None:
        self._calls, self.context = calls, context
        now = trio.current_time()
        self.call = UpstreamCall(trio.CancelScope(), now, now)

    def __enter__(self) -> UpstreamCall:
        self._calls[self.call] = None
        self.context.on_change(self._cancel)
        self.call.scope.__enter__()
        return self.call

    def __exit__(self, *raised: Any) -> bool:  # noqa: PYI036 -- as a scope takes it
        del self._calls[self.call]
        self.context.off_change(self._cancel)
        return bool(self.call.scope.__exit__(*raised))

    def _cancel(self, _: State) -> None:
        self.call.scope.cancel()
