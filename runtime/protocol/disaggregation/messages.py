"""What decode and prefill workers say to each other about one prompt, in both modes.

*Decode first*: the decode worker has blocks for the prompt. It puts a `RemotePrefillRequest` into the
work queue, which names the prompt by its hash: a broker carries none. Whoever takes it opens a stream to
the decode worker with a `Claim`, and is told the prompt and where to write (`Lent`). Its last write notifies
with a `PrefillDone`. The stream is the life line of both.

*Prefill first*: the decode worker opens a stream to a prefill worker with a `PrefillAsk`. That one
says when it begins (`Begun`), computes, and says where the blocks can be read (`Kept`).

Only engines whose KV fingerprints are equal can exchange blocks, so endpoints and queue are named
after it (`Pairing`): who does not fit is not found.
"""

from __future__ import annotations

import hashlib
import zlib
from functools import partial
from typing import Annotated, Final, TypeVar

import attrs
import msgspec

from ...errors import RemoteProtocolError
from ..discovery.instances import EndpointName
from ..openai.generate import GenerateRequest, TokenCount
from ..traceparent import TRACEPARENT_CHARS_MAX
from ..transfer.settlement import PEER_BYTES_MAX
from ..undecodable import decoded

JOB_ID_CHARS_MAX: Final = 128
HASH_BYTES: Final = 32
_TOKEN_ID_BYTES_MAX: Final = 5
_OTHER_FIELDS_BYTES: Final = 1 << 14
_SHAPE_BYTES_MAX: Final = 1 << 17
"""Of schema, tools and biases. A request with more of them is refused, and computed where it is."""
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=JOB_ID_CHARS_MAX)]
Descriptor = Annotated[bytes, msgspec.Meta(max_length=PEER_BYTES_MAX)]
BlockIds = list[TokenCount]
Ticket = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
T = TypeVar("T")


@attrs.frozen
class Pairing:
    """Where the workers of one namespace that can exchange KV blocks find each other."""

    namespace: str
    digest: str

    @classmethod
    def of(cls, namespace: str, fingerprint: str) -> Pairing:
        """Of engines with this KV fingerprint."""
        # A broker may be shared by namespaces.
        return cls(namespace, f"{zlib.crc32(f'{namespace}/{fingerprint}'.encode()):08x}")

    @property
    def prefill_endpoint(self) -> EndpointName:
        """Prefill workers serve it; it takes a `PrefillAsk` and streams a `Begun` and a `Kept`."""
        return EndpointName(self.namespace, "prefill", self.digest)

    @property
    def handoff_endpoint(self) -> EndpointName:
        """Decode workers serve it; it takes a `Claim` and streams one `Lent`."""
        return EndpointName(self.namespace, "handoff", self.digest)

    @property
    def queue(self) -> str:
        return f"prefill-{self.digest}"


class RemotePrefillRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A job of the work queue: ask that decode worker for this prompt, and compute it."""

    id: Name
    """Of the job, and of the claim."""
    request_id: str
    """What the client's request is called, for logs."""
    prompt_hash: Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
    """Of what its claim is answered with."""
    instance_id: Name
    """The decode worker."""
    timeout_s: Seconds
    """So long after the put nobody waits for it any more."""
    traceparent: Annotated[str, msgspec.Meta(max_length=TRACEPARENT_CHARS_MAX)] = ""
    """The decode worker's span of the wait; empty unless it traces."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill worker to a decode worker: I have your job, is it still wanted?"""

    id: Name
    descriptor: Descriptor | None
    """Who will write, for whoever lends the blocks (`EngineTransfers.descriptor`)."""


class Lent(msgspec.Struct, frozen=True, kw_only=True):
    """The decode worker's answer: compute this prompt, and write these blocks, with this ticket.

    `block_ids` are those of the prompt without its first `skip_blocks`, which are there already.
    """

    prompt: bytes
    """A `GenerateRequest` as `prefill_request` makes it, of the hash that the job names."""
    ticket: Ticket
    block_ids: BlockIds
    skip_blocks: TokenCount


class PrefillDone(msgspec.Struct, frozen=True, kw_only=True):
    """What the last write notifies: every block has arrived."""

    first_token: TokenCount


class PrefillAsk(msgspec.Struct, frozen=True, kw_only=True):
    """A decode worker to a prefill worker: compute this prompt, and keep it for me."""

    request: GenerateRequest
    """As `prefill_request` makes it."""
    descriptor: Descriptor | None
    """Who will read the blocks."""
    timeout_s: Seconds
    """How long they are kept for it."""


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The prefill worker has a place for the prompt, and computes it."""


class Kept(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The prefill worker's answer: the first token, and where all blocks of the prompt are."""

    first_token: TokenCount
    engine_id: Name
    block_ids: BlockIds
    ticket: Ticket


def ask_bytes_max_for(context_tokens_max: int) -> int:
    """Upper bound of an encoded `PrefillAsk`, which carries token ids and no text."""
    tokens_bytes = context_tokens_max * _TOKEN_ID_BYTES_MAX
    return tokens_bytes + _SHAPE_BYTES_MAX + _OTHER_FIELDS_BYTES


def prefill_request(request: GenerateRequest, token_ids: list[int]) -> GenerateRequest:
    """What a prefill worker is to compute of `request`: its known tokens, and one more.

    `request.seed` must be set: the token drawn here is the one that was to be drawn there.
    """
    assert request.seed is not None, "two engines would draw from different seeds"
    delivered = request.delivered_ids
    return msgspec.structs.replace(
        request,
        messages=None,
        prompt=None,
        # Penalties, grammars and the least length know where the answer begins.
        token_ids=token_ids[: len(token_ids) - len(delivered)],
        max_tokens=len(delivered) + 1,
        stop=[],
        logprobs=None,
        return_token_ids=False,
    )


encode: Final = msgspec.msgpack.Encoder().encode


def hash_of(prompt: bytes) -> bytes:
    """What a job calls an encoded prompt."""
    return hashlib.sha256(prompt).digest()


def decode_prompt(prompt: bytes, prompt_hash: bytes) -> GenerateRequest:
    """The prompt that a job names; `RemoteProtocolError` if it is another one, or none."""
    if hash_of(prompt) != prompt_hash:
        raise RemoteProtocolError("the prompt is not the one that the job names")
    return _decode(prompt, kind=GenerateRequest)


def _decode(payload: bytes, *, kind: type[T]) -> T:
    """`RemoteProtocolError` if it is something else."""
    found: T = decoded(partial(msgspec.msgpack.decode, type=kind), payload, f"no {kind.__name__}")
    return found


decode_job: Final = partial(_decode, kind=RemotePrefillRequest)
"""The job in a payload."""
decode_done: Final = partial(_decode, kind=PrefillDone)
"""What a write notified."""
