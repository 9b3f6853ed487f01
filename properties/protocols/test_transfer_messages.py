"""Descriptions and transfer messages: what is encoded decodes to the same, garbage is refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, strategies as st

from trinamo.runtime.errors import RemoteProtocolError, RequestError
from trinamo.runtime.protocol.transfer.description import (
    MemoryDescription,
    check_blocks,
    decode_description,
    decode_descriptions,
    encode_description,
    runs,
)
from trinamo.runtime.protocol.transfer.stream import (
    decode_message,
    pack_blocks,
    unpack_blocks,
)

numbers = st.integers(0, 2**32 - 1)


@given(
    blocks=st.integers(1, 1000),
    block_bytes=st.integers(1, 1 << 20),
    bases=st.lists(st.integers(0, 2**62), max_size=5).map(tuple),
    parts=st.integers(1, 160),
    generation=st.integers(1, 2**63 - 1),
    fingerprint=st.text(max_size=100),
    address=st.binary(max_size=200),
)
def test_a_description_decodes_to_itself(
    blocks: int,
    block_bytes: int,
    bases: tuple[int, ...],
    parts: int,
    generation: int,
    fingerprint: str,
    address: bytes,
) -> None:
    described = MemoryDescription(
        backend="tcp",
        incarnation="0a",
        region=1,
        generation=generation,
        fingerprint=fingerprint,
        bases=bases,
        length=blocks * block_bytes * parts * max(1, len(bases)),
        block_bytes=block_bytes,
        parts=parts,
        address=address,
    )
    assert decode_description(encode_description(described)) == described


@given(st.binary(max_size=300))
def test_garbage_is_a_remote_protocol_error_and_nothing_else(data: bytes) -> None:
    for decode in (decode_description, decode_descriptions, decode_message):
        with contextlib.suppress(RemoteProtocolError):
            decode(data)


@given(st.lists(numbers, max_size=100))
def test_block_lists_decode_to_themselves(blocks: list[int]) -> None:
    assert unpack_blocks(pack_blocks(blocks)) == blocks


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=40))
def test_runs_cover_every_position_once_and_count_up_in_every_list(
    pairs: list[tuple[int, int]],
) -> None:
    lists = [[a for a, _ in pairs], [b for _, b in pairs]]
    covered: list[int] = []
    for position, count in runs(*lists):
        assert count > 0
        covered += range(position, position + count)
        for each in lists:
            part = each[position : position + count]
            assert part == list(range(part[0], part[0] + count))
    assert covered == list(range(len(pairs)))


@given(st.lists(st.integers(-3, 12), max_size=15), st.integers(1, 10), st.booleans())
def test_block_lists_are_taken_exactly_when_every_block_is_there(
    blocks: list[int], count: int, is_target: bool
) -> None:
    fits = all(0 <= b < count for b in blocks) and not (is_target and len({*blocks}) < len(blocks))
    if fits:
        check_blocks(blocks, count, whose="local", is_target=is_target)
    else:
        with pytest.raises(RequestError):
            check_blocks(blocks, count, whose="local", is_target=is_target)
