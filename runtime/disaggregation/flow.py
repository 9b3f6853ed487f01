"""What the two ways to have a prompt computed elsewhere have in common."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

import attrs

from ..caller.client import ResponseStream
from ..context import Context
from ..engines.handoff import HandsOver, Prompt, Reservation
from ..errors import RemoteProtocolError, RequestError
from ..protocol.disaggregation.decision import PrefillReason
from ..protocol.openai.generate import GenerateRequest
from .lending import Lending

T = TypeVar("T")


@attrs.frozen
class Filled:
    """A reservation all of whose blocks are filled: it can be adopted."""

    reservation: Reservation
    first_token: int
    block_count: int
    """How many blocks were moved for it."""


class Flow(Protocol):
    """One way to have a prompt computed by a prefill worker, as the decode worker sees it."""

    mode: str
    """As `disaggregation.mode` calls it."""
    lending: Lending

    @property
    def is_reachable(self) -> bool:
        """Whether anybody would hear of a prompt."""
        ...

    @property
    def depth(self) -> int:
        """Prompts that wait for a prefill worker, as far as is known here."""
        ...

    def filled(
        self, request: GenerateRequest, prompt: Prompt, context: Context
    ) -> AbstractAsyncContextManager[Filled | PrefillReason]:
        """Have the prompt of `request`, which has a seed, computed elsewhere.

        Yields a reservation that can be adopted inside, or why there is none: then nothing is held,
        and the prompt can be computed here. Raises what `HandsOver.reserve` raises. Cancelled, it
        gives back what it holds; blocks that the other side may touch are free when it cannot.
        """
        ...


def check_token(host: HandsOver, token_id: int) -> None:
    """Raise `RemoteProtocolError` for what a prefill worker calls a token, and `host` does not.

    A step that goes on from it would fail, and with it the answers of all others.
    """
    try:
        host.examine(GenerateRequest(model="", token_ids=[token_id]))
    except RequestError as error:
        raise RemoteProtocolError(f"the first token is {token_id}: {error}") from error


async def first_item(stream: ResponseStream[T]) -> T:
    """The one item of a stream that then only says how long it lasts."""
    async for item in stream:
        return item
    raise RemoteProtocolError("the stream ended without an item")


async def wait_end(stream: ResponseStream[Any]) -> None:
    """Return at the stream's complete end; raises what else ended it."""
    async for _ in stream:
        raise RemoteProtocolError("the stream has a second item")
