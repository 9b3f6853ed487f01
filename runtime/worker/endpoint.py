"""What one endpoint runs: the handler, what it takes, and what its exceptions become."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self

import attrs
import msgspec

from ..context import Context
from ..errors import EngineError, RequestError, TrinamoError, UnknownModelError
from ..logs.text import name_error
from ..nurseries import is_failure, single
from ..protocol.discovery.instances import EndpointName
from ..protocol.streams.request import Envelope, RequestKind
from ..protocol.undecodable import UNDECODABLE, decoding_fault, explain
from ..sinks import Sink, forward_items

_log = logging.getLogger("trinamo.worker")

StreamHandler = Callable[[Any, Context], AsyncIterator[Any]]
PushHandler = Callable[[Any, Context, Sink[Any]], Awaitable[None]]
UnaryHandler = Callable[[Any, Context], Awaitable[Any]]
InputHandler = Callable[[Any, Context, AsyncIterator[Any]], AsyncIterator[Any]]


def _has_room() -> None:
    pass


@attrs.frozen(eq=False)
class Endpoint:
    """A name and exactly one handler: streaming, by pull or push, unary or bidirectional."""

    name: EndpointName
    request_type: Any = Any
    stream: StreamHandler | None = None
    """An async generator: what it yields is streamed to the caller."""
    push: PushHandler | None = None
    """An async function: what it hands to the sink is streamed, and the answer complete at its end."""
    unary: UnaryHandler | None = None
    """An async function: what it returns is the answer."""
    bidirectional: InputHandler | None = None
    """As `stream`, with an iterator over the caller's input items as third argument."""
    input_type: Any = Any
    """Of one input item."""
    payload_bytes_max: float = math.inf
    """A longer payload is refused before it is decoded."""
    for_workers: bool = False
    """Other workers ask it of this one. Who serves it refuses its requests himself: no bound here does,
    and no drain. They take nobody's place. Who asks and proves to be no worker is refused."""
    model: str = ""
    """The one model it serves; a request whose field `model` names another is refused."""
    check_room: Callable[[], None] = _has_room
    """Raises `OverloadedError` while whoever serves it has enough to do; asked before decoding."""
    _decoder: Any = attrs.field(init=False)

    @_decoder.default
    def _make_decoder(self) -> Any:
        return msgspec.msgpack.Decoder(self.request_type)

    def accept(self, envelope: Envelope, payload: bytes) -> Any:
        """The decoded request.

        Raises `RequestError` if it is invalid, `UnknownModelError` if it is for another model, and
        `OverloadedError` if there is no room for it.
        """
        self.check_room()
        if (envelope.kind is RequestKind.UNARY) is not (self.unary is not None):
            raise RequestError(f"endpoint {self.name} does not answer {envelope.kind} requests")
        if (envelope.request is not None) is not (self.bidirectional is not None):
            expects = "expects" if self.bidirectional else "does not take"
            raise RequestError(f"endpoint {self.name} {expects} an input stream")
        if len(payload) > self.payload_bytes_max:
            raise RequestError(f"the payload is longer than {self.payload_bytes_max:.0f} bytes")
        try:
            request = self._decoder.decode(payload)
        except UNDECODABLE as error:
            raise explain(error, "the payload does not decode") from error
        wanted = getattr(request, "model", self.model)
        if self.model and wanted != self.model:
            # An answer of this model under the other's name would be a wrong one.
            raise UnknownModelError(f"this worker serves {self.model!r}, not {str(wanted)[:80]!r}")
        return request

    def run_stream(self, request: Any, context: Context, sink: Sink[Any]) -> Awaitable[None]:
        """Run the streaming handler: its items go to `sink`."""
        if self.push is not None:
            return self.push(request, context, sink)
        assert self.stream is not None
        return forward_items(self.stream(request, context), sink)

    async def run_unary(self, request: Any, context: Context) -> Any:
        """Run the unary handler."""
        assert self.unary is not None
        return await self.unary(request, context)

    def run_bidirectional(
        self, request: Any, context: Context, raw: AsyncIterator[bytes], sink: Sink[Any]
    ) -> Awaitable[None]:
        """Run the bidirectional handler over decoded input items: its own go to `sink`."""
        assert self.bidirectional is not None
        inputs = DecodedInput(raw, self.input_type)
        return forward_items(self.bidirectional(request, context, inputs), sink)


class DecodedInput:
    """The items of a caller's input; an iterator, since nobody closes a generator for a handler."""

    __slots__ = ("_decode", "_raw")

    def __init__(self, raw: AsyncIterator[bytes], item_type: Any) -> None:
        self._raw = raw
        self._decode = msgspec.msgpack.Decoder(item_type).decode

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """The next item, or what the input ends with; `RequestError` if it does not decode."""
        item = await self._raw.__anext__()
        try:
            return self._decode(item)
        except UNDECODABLE as error:
            raise RequestError(f"an input item does not decode: {decoding_fault(error)}") from error


def single_error(raised: BaseException, what: str) -> TrinamoError:
    """The one error to tell the caller: ours as it is, a stranger's as an `EngineError`.

    Raises `raised` again if no code has failed: it ends a task, or the process.

    A group, from a handler with nurseries of its own, is taken apart (`nurseries.single`). What is
    not ours is logged here, once, with its traceback.
    """
    if not is_failure(raised):
        raise raised
    error = single(raised)
    if isinstance(error, TrinamoError):
        return error
    _log.error("%s: the handler raised", what, exc_info=raised)
    return EngineError(name_error(error))
