"""Embeddings between the steps of an engine: one chunk of one prompt a step, so that answers go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs
import trio

from ...errors import EngineError, OverloadedError
from ...nurseries import is_failure
from .step import Embeds

WAITING_MAX: Final = 256
"""Embeddings that wait for their turn, or are under way."""


@attrs.define(eq=False)
class _Asked:
    chunks: Iterator[bytes]
    value: bytes = b""
    error: Exception | None = None
    is_over: trio.Event = attrs.Factory(trio.Event)

    def end(self, value: bytes, error: Exception | None = None) -> None:
        self.value, self.error = value, error
        self.is_over.set()


class Embeddings:
    """Those that were asked of one engine, in order; `wake` is called when there is one more."""

    def __init__(self, hop: Any, wake: Callable[[], None]) -> None:
        """`hop` is that of the steps, which runs any one call."""
        self._hop, self._wake = hop, wake
        self._asked: dict[_Asked, None] = {}

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._asked)

    async def of(self, engine: Embeds, token_ids: list[int]) -> bytes:
        """The embedding of a prompt; raises what ended it, or `OverloadedError` if too many wait.

        Cancelled, it is over with the chunk that is under way.
        """
        if len(self._asked) >= WAITING_MAX:
            raise OverloadedError(
                f"{WAITING_MAX} embeddings are waiting already",
                bound="embeddings_waiting",
                value=WAITING_MAX,
            )
        asked = _Asked(engine.embed(token_ids))
        self._asked[asked] = None
        self._wake()
        try:
            await asked.is_over.wait()
        finally:
            self._asked.pop(asked, None)
        if asked.error is not None:
            raise asked.error
        return asked.value

    async def step(self) -> None:
        """Compute one chunk of the first; between two steps, and by one task alone."""
        asked = next(iter(self._asked), None)
        if asked is None:
            return
        try:
            value = await self._hop(next, asked.chunks)
        except BaseException as error:
            if not is_failure(error):
                raise
            failure = EngineError(f"an embedding failed with {type(error).__name__}: {error}")
            failure.__cause__ = error
            asked.end(b"", failure)
        else:
            if value:
                asked.end(value)
        if asked.is_over.is_set():
            self._asked.pop(asked, None)

    def close(self, error: Exception) -> None:
        """End all with `error`."""
        for asked in tuple(self._asked):
            asked.end(b"", error)
        self._asked.clear()
