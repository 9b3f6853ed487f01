"""What the two ways to have a prompt computed elsewhere have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Protocol, TypeVar

import attrs

from ..caller.client import ResponseStream
from ..context import Context
from ..engines.handoff import HandsOver, Prompt, Reservation
from ..errors import RemoteProtocolError, RequestError
from ..kv.pool import BlockPool, block_count_for
from ..protocol.disaggregation.decision import PrefillReason
from ..protocol.openai.generate import GenerateRequest


class Lending:
    """The bound of one pool: how much of it may depend on prefill workers.

    Those that hang give nothing back: blocks that a peer may write, or that a read may still fill,
    are nobody's until that has settled, or is proven never to happen. So no more than a share of the
    pool is promised, lent or in quarantine at a time, and prompts beyond it are computed where their
    answer is.
    """

    def __init__(self, pool: BlockPool, *, block_tokens: int, share: float) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._blocks_max = int(share * pool.block_count)
        self._promised = 0

    @property
    def room(self) -> int:
        """How many more blocks may be promised now."""
        held = self._pool.in_flight_count + self._pool.quarantined_count
        return self._blocks_max - self._promised - held

    def missing(self, prompt: Prompt) -> int:
        """How many blocks of `prompt` would have to come."""
        skip = prompt.cached_tokens // self._block_tokens
        return block_count_for(len(prompt.token_ids), self._block_tokens) - skip

    @contextmanager
    def promise(
        self, prompt: Prompt
    ) -> Iterator[Callable[[Reservation], tuple[int, list[int]] | None]]:
        """Count the missing blocks of `prompt` as promised until the block is left.

        What it yields leases those of a reservation instead, and says how many leading blocks are
        there already, and the ids of those to be filled. None if these have become more than the
        bound lets: then nothing is leased.
        """
        promised, lent = self.missing(prompt), list[int]()
        self._promised += promised

        def lend(reservation: Reservation) -> tuple[int, list[int]] | None:
            nonlocal promised
            self._promised -= promised
            promised = 0
            skip = reservation.prompt.cached_tokens // self._block_tokens
            blocks = list(reservation.block_ids[skip:])
            if len(blocks) > self.room:
                return None
            self._pool.lease(blocks)
            lent.extend(blocks)
            return skip, blocks

        try:
            yield lend
        finally:
            self._promised -= promised
            self._pool.release(lent)


T = TypeVar("T")


@attrs.frozen
class Filled:
    """A reservation all of whose blocks are filled: it can be adopted."""

    reservation: Reservation
    first_token: int
    block_count: int
    """How many blocks were moved for it."""


class PrefillFlow(Protocol):
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
