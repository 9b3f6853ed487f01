"""What a caller holds while a worker answers: the items that come, and those that it sends."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Self, TypeVar

import msgspec

from ..errors import DisconnectedError, RemoteProtocolError
from ..protocol.undecodable import UNDECODABLE
from ..sinks import Sink
from .attempts import StreamAttempt
from .deadline import within
from .router import Router

T = TypeVar("T")
_encode = msgspec.msgpack.Encoder().encode


class ResponseStream(Generic[T]):
    """The items of one answer, then its end or one `TrinamoError`.

    Leaving the `async with` that yielded it, at any point and for any reason, kills what is left.
    """

    def __init__(
        self, attempt: StreamAttempt, decoder: msgspec.msgpack.Decoder[T], router: Router
    ) -> None:
        self.instance = attempt.instance
        """The worker that answers."""
        self.cached_blocks: int | None = None
        """Leading blocks of the prompt that it had, as the policy `kv` knew; None under others."""
        self._channel = attempt.channel
        self._context = attempt.context
        self._decode = decoder.decode
        self._router = router
        self._on_first: Callable[[], None] | None = None

    def tell_first(self, listener: Callable[[], None]) -> None:
        """Call `listener` when the first item comes by `forward`; to be said before that."""
        self._on_first = listener

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """The next item.

        Raises `DisconnectedError` if the worker went away (it is inhibited by then), or said
        nothing for `router.silence_grace_s` and has left discovery or does not answer
        (`liveness.py`); `KilledError` if the context was killed, `DeadlineError` once its deadline
        is over, or what the handler raised.
        """
        try:
            if self._context.deadline == math.inf:
                return self._decode(await self._channel.__anext__())
            return self._decode(await within(self._context, self._channel.__anext__))
        except UNDECODABLE as error:
            nonsense = _undecodable(error)
            self._router.fail(self.instance, nonsense, self._context)
            raise nonsense from error
        except (DisconnectedError, RemoteProtocolError) as error:
            self._router.fail(self.instance, error, self._context)
            raise

    async def forward(self, sink: Sink[T]) -> None:
        """Hand every item to `sink` as it comes, instead of iterating; returns at the end.

        Sleeps in between: `sink` is called in the turn of the connection's reader. Raises what
        iterating raises, or what `sink` does.
        """
        try:
            decoding: Sink[bytes] = _Decoding(self._decode, sink)
            if self._on_first is not None:
                decoding = Telling(decoding, self._on_first)
            await within(self._context, partial(self._channel.forward, decoding))
        except (DisconnectedError, RemoteProtocolError) as error:
            self._router.fail(self.instance, error, self._context)
            raise


class _Decoding(Sink[bytes]):
    """Decodes items for another sink. One that does not decode comes after those before it."""

    __slots__ = ("_decode", "_sink")

    def __init__(self, decode: Callable[[bytes], T], sink: Sink[T]) -> None:
        super().__init__()
        self._decode, self._sink = decode, sink

    def starts(self, resume: Callable[[], None]) -> None:
        self._sink.starts(resume)

    def take(self, items: list[bytes]) -> bool:
        decoded: list[Any] = []
        try:
            for item in items:
                decoded.append(self._decode(item))  # noqa: PERF401 -- those before a bad one count
        except UNDECODABLE as error:
            if decoded:
                self._sink.take(decoded)
            raise _undecodable(error) from error
        return self._sink.take(decoded)


class Telling(Sink[T]):
    """Tells of the first items that come, and hands all on."""

    __slots__ = ("_on_first", "_sink")

    def __init__(self, sink: Sink[T], on_first: Callable[[], None]) -> None:
        super().__init__()
        self._sink = sink
        self._on_first: Callable[[], None] | None = on_first

    def starts(self, resume: Callable[[], None]) -> None:
        self._sink.starts(resume)

    def take(self, items: list[T]) -> bool:
        if self._on_first is not None:
            on_first, self._on_first = self._on_first, None
            on_first()
        return self._sink.take(items)


def _undecodable(error: Exception) -> RemoteProtocolError:
    return RemoteProtocolError(f"an item does not decode: {error}")


class Exchange(ResponseStream[T]):
    """A response stream whose worker takes a stream of input as well.

    Leaving it before `finish` kills the request: half an input must not pass for a whole one.
    """

    __slots__ = ("_input",)

    def __init__(
        self, attempt: StreamAttempt, decoder: msgspec.msgpack.Decoder[T], router: Router
    ) -> None:
        super().__init__(attempt, decoder, router)
        assert attempt.input is not None
        self._input = attempt.input

    async def send(self, item: Any) -> None:
        """Queue one input item; waits while `queue_bytes_max` bytes wait for the worker.

        A worker that waits for its answers to be read may not read, so let another task do that.
        Raises `DisconnectedError` once the worker takes no more input, be it that it has answered,
        `KilledError` once the request was stopped or killed, and `DeadlineError` once its time is
        up.
        """
        await within(self._context, partial(self._input.send, _encode(item)))

    async def finish(self) -> None:
        """Say that the input is complete; the handler's iterator ends."""
        await within(self._context, self._input.finish)
