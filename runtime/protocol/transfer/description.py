"""What two transfer planes tell each other about memory: the description, its bounds, its checks.

A description travels through any other plane, as bytes that a stranger may have made: it is
bounded and checked when parsed. Sans-IO; the steps of the tcp backend's stream are in
`stream.py`, the interface is `planes/transfer.py`.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Final

import msgspec

from ...errors import IncompatibleKvError, RemoteProtocolError, RequestError
from ..undecodable import decoded


def encode_fingerprint(facts: Mapping[str, object]) -> str:
    """The facts in their order, such as `engine=exact version=1`.

    Raises `ValueError` for a fact that could not be told from the next one.
    """
    words = [f"{name}={value}" for name, value in facts.items()]
    if wrong := next((word for word in words if len(word.split()) != 1), None):
        raise ValueError(f"{wrong!r} is no fact of a fingerprint: it has white space in it")
    return " ".join(words)


def differences(ours: str, theirs: str) -> str:
    """In which facts two fingerprints differ, for a reader; empty if they are equal."""
    if ours == theirs:
        return ""
    here, there = _facts(ours), _facts(theirs)
    return "; ".join(
        f"{name.replace('_', ' ')} {here.get(name, 'none')} here, {there.get(name, 'none')} there"
        for name in (*here, *(name for name in there if name not in here))
        if here.get(name) != there.get(name)
    )


def _facts(fingerprint: str) -> dict[str, str]:
    """What is no fact counts as one without a name."""
    pairs = [word.partition("=") for word in fingerprint.split()]
    return {name if mark else "": value if mark else name for name, mark, value in pairs}


BLOCKS_MAX: Final = 1 << 17
"""Blocks of one transfer."""
BLOCK_BYTES_MAX: Final = 1 << 30
DESCRIPTION_BYTES_MAX: Final = 128 * 1024
ADDRESS_BYTES_MAX: Final = 96 * 1024
BACKENDS_MAX: Final = 8
BUFFERS_MAX: Final = 1024
"""Of one region: keys and values of 512 layers."""
PARTS_MAX: Final = 4096
NOTIFY_BYTES_MAX: Final = 4096
_VERSION: Final = 2


def draw_incarnation(rng: random.Random) -> str:
    """What tells one process from all others, before and after it, to those it transfers with.

    All its transfer planes have the same, so that who is gone is gone on every backend.
    """
    return f"{rng.getrandbits(64):016x}"


class Direction(enum.StrEnum):
    """Which way the blocks go, seen by the side that starts the transfer."""

    READ = "read"
    """From the peer's memory to ours."""
    WRITE = "write"
    """From our memory to the peer's."""


_U63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[a-z0-9_.-]+$")]


class MemoryDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One region of one plane in one process, as its peers see it."""

    backend: _Name
    """Which transfer plane it belongs to, such as `tcp`."""
    incarnation: _Name
    """Of the process that registered it; the next process has another."""
    region: _U63
    """Its number there."""
    generation: _Positive
    """Counted up when the owner declares all earlier descriptions void."""
    fingerprint: Annotated[str, msgspec.Meta(max_length=512)]
    """What the bytes mean; equal on both sides of a transfer."""
    bases: Annotated[tuple[_U63, ...], msgspec.Meta(max_length=BUFFERS_MAX)] = ()
    """The addresses of its buffers in the owner's process, all as long; none where peers need not
    know. Blocks are numbered through them, in this order."""
    length: _Positive
    """Bytes of all buffers together, a multiple of `block_bytes`."""
    block_bytes: Annotated[int, msgspec.Meta(ge=1, le=BLOCK_BYTES_MAX)]
    parts: Annotated[int, msgspec.Meta(ge=1, le=PARTS_MAX)] = 1
    """In how many places a block of the owner's pool lies. Block `n` of the pool is the blocks
    `n`, `n + pool_blocks`, `n + 2 * pool_blocks`, … here, which a ticket is granted together."""
    address: Annotated[bytes, msgspec.Meta(max_length=ADDRESS_BYTES_MAX)] = b""
    """How to reach the owner, in the backend's own form."""
    version: Annotated[int, msgspec.Meta(ge=_VERSION, le=_VERSION)] = _VERSION

    @property
    def block_count(self) -> int:
        """Blocks are numbered from 0 to one less than this."""
        return self.length // self.block_bytes

    @property
    def pool_blocks(self) -> int:
        """How many blocks the owner's pool has, whatever they are cut into here."""
        return self.block_count // self.parts


encode_description: Final = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(MemoryDescription)


def decode_description(data: bytes, *, backend: str | None = None) -> MemoryDescription:
    """The description in `data`, bounds checked; `RemoteProtocolError` for anything else.

    With `backend`, one of another backend is refused too.
    """
    if len(data) > DESCRIPTION_BYTES_MAX:
        raise RemoteProtocolError(
            f"a memory description of {len(data)} bytes; at most {DESCRIPTION_BYTES_MAX} are taken"
        )
    found = decoded(_decoder.decode, data, "not a memory description")
    buffers = len(found.bases) or 1
    whole = found.block_bytes * math.lcm(buffers, found.parts)
    if found.length % whole:
        raise RemoteProtocolError(
            f"described memory of {found.length} bytes is no whole number of blocks "
            f"of {found.block_bytes} in {buffers} buffers and {found.parts} parts"
        )
    if max(found.bases, default=0) + found.length // buffers > 2**63:
        raise RemoteProtocolError("described memory ends beyond every address space")
    if backend is not None and found.backend != backend:
        raise RemoteProtocolError(f"described memory is of {found.backend}, not of {backend}")
    return found


def check_blocks(
    blocks: Sequence[int],
    block_count: int,
    *,
    whose: str,
    is_target: bool = False,
    blocks_max: int | None = BLOCKS_MAX,
) -> None:
    """Raise `RequestError` unless all `blocks` are in a region of `block_count` blocks.

    With `is_target` also if one is named twice: two blocks cannot both arrive in one place. And if
    there are more than `blocks_max`, where that is bounded.
    """
    if not blocks:
        return
    if blocks_max is not None and len(blocks) > blocks_max:
        raise RequestError(f"{len(blocks)} blocks in one transfer; at most {blocks_max} are moved")
    if min(blocks) < 0 or max(blocks) >= block_count:
        wrong = next(b for b in blocks if not 0 <= b < block_count)
        raise RequestError(f"block {wrong} is not of the {whose} region of {block_count} blocks")
    if is_target and len(set(blocks)) != len(blocks):
        raise RequestError(f"a block of the {whose} region is named twice as a target")


def pool_numbers(blocks: Sequence[int], pool_blocks: int, parts: int) -> Sequence[int]:
    """Which blocks of the owner's pool these are a part of, each once."""
    if parts == 1:
        return blocks
    return list({block % pool_blocks: None for block in blocks})


encode_descriptions: Final = encode_description
"""One piece of memory, by every backend."""
_list_decoder: Final = msgspec.msgpack.Decoder(
    Annotated[list[bytes], msgspec.Meta(min_length=1, max_length=BACKENDS_MAX)]
)


def decode_descriptions(data: bytes) -> dict[str, bytes]:
    """Descriptions by backend, each checked; `RemoteProtocolError` for anything else.

    All of them must describe memory of the same size, block size and fingerprint.
    """
    if len(data) > BACKENDS_MAX * DESCRIPTION_BYTES_MAX:
        raise RemoteProtocolError(f"descriptions of {len(data)} bytes")
    descriptions: list[bytes] = decoded(_list_decoder.decode, data, "no descriptions of memory")
    offered: dict[str, bytes] = {}
    shapes: dict[tuple[int, int, int, str], None] = {}
    for each in descriptions:
        described = decode_description(each)
        offered[described.backend] = each
        shape = described.length, described.block_bytes, described.parts, described.fingerprint
        shapes[shape] = None
    if len(shapes) > 1:
        raise RemoteProtocolError("descriptions of memory of different shapes")
    return offered


def check_compatible(local: MemoryDescription, remote: MemoryDescription) -> None:
    """Raise `IncompatibleKvError` unless blocks mean the same on both sides."""
    if differ := differences(local.fingerprint, remote.fingerprint):
        raise IncompatibleKvError(f"KV of two engines that cannot exchange it: {differ}")
    if (local.block_bytes, local.parts) != (remote.block_bytes, remote.parts):
        raise IncompatibleKvError(
            f"blocks of {local.parts} times {local.block_bytes} bytes here, "
            f"of {remote.parts} times {remote.block_bytes} there"
        )


def check_transfer(
    direction: Direction,
    local: MemoryDescription,
    local_blocks: Sequence[int],
    remote: MemoryDescription,
    remote_blocks: Sequence[int],
    *,
    notify: bytes | None,
    ticket: int,
) -> None:
    """Raise what `TransferPlane.start` says unless these blocks may be moved."""
    check_compatible(local, remote)
    if len(local_blocks) != len(remote_blocks):
        raise RequestError(f"{len(local_blocks)} blocks here, {len(remote_blocks)} there")
    is_read = direction is Direction.READ
    check_blocks(local_blocks, local.block_count, whose="local", is_target=is_read)
    check_blocks(remote_blocks, remote.block_count, whose="remote", is_target=not is_read)
    if notify is not None and not ticket:
        raise RequestError("a notification completes a grant, and needs its ticket")
    if notify is not None and len(notify) > NOTIFY_BYTES_MAX:
        raise RequestError(f"a notification of {len(notify)} bytes, over {NOTIFY_BYTES_MAX}")


def runs(*lists: Sequence[int]) -> Iterator[tuple[int, int]]:
    """`(position, count)` of the longest runs in which every list counts up by one.

    So `lists[k][position] + i` is block `position + i` of list `k`: one descriptor each.
    """
    if not lists or not lists[0]:
        return
    start, length = 0, len(lists[0])
    for position in range(1, length):
        for each in lists:
            if each[position] != each[position - 1] + 1:
                yield start, position - start
                start = position
                break
    yield start, length - start
