"""Names of blocks are equal exactly where key, tenant and all tokens so far are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
from hypothesis import given, strategies as st

from trinamo.runtime.protocol.kv.names import BlockNames

BLOCK_TOKENS: Final = 2


@attrs.frozen
class Prompt:
    """Who names what."""

    shared: bytes
    tenant: str
    token_ids: Sequence[int]

    def names(self) -> list[bytes]:
        names = BlockNames(self.shared)
        return names.of_tokens(self.token_ids, BLOCK_TOKENS, names.root(self.tenant))


# Few of each, so that equal ones meet; among them what is one text when it is joined.
PROMPTS = st.builds(
    Prompt,
    st.sampled_from([b"", b"a", b"another", b"a" * 100]),
    st.sampled_from(["", "a", "0123456789abcdef", "0123456789abcdef\0\0\0\0"]),
    st.lists(st.integers(0, 1) | st.just(2**32 - 1), max_size=9),
)


@given(PROMPTS, PROMPTS)
def test_names_are_equal_where_all_is_that_they_stand_for(one: Prompt, other: Prompt) -> None:
    """Else no name of the one is any of the other's, nor do two of its own have one."""
    ours, theirs = one.names(), other.names()
    assert len(ours) == len(set(ours)) == len(one.token_ids) // BLOCK_TOKENS
    common = 0
    if (one.shared, one.tenant) == (other.shared, other.tenant):
        blocks = zip(ours, theirs, strict=False)
        for at, _ in enumerate(blocks):
            end = (at + 1) * BLOCK_TOKENS
            common += one.token_ids[:end] == other.token_ids[:end]
    assert ours[:common] == theirs[:common]
    assert set(ours[common:]).isdisjoint(theirs[common:])
    assert set(ours[common:]).isdisjoint(theirs)


@given(PROMPTS, st.integers(0, 4))
def test_going_on_from_a_block_names_as_naming_all_at_once(prompt: Prompt, known: int) -> None:
    """As a scheduler does it, block by block, and a frontend the whole prompt."""
    names, whole = BlockNames(prompt.shared), prompt.names()
    known = min(known, len(whole))
    parent = whole[known - 1] if known else names.root(prompt.tenant)
    rest = prompt.token_ids[known * BLOCK_TOKENS :]
    assert names.of_tokens(rest, BLOCK_TOKENS, parent) == whole[known:]


@given(PROMPTS, PROMPTS)
def test_marks_say_whether_names_are_alike(one: Prompt, other: Prompt) -> None:
    """Without naming anything; whose tenants they are does not matter."""
    ours, theirs = BlockNames(one.shared), BlockNames(other.shared)
    assert (ours.mark == theirs.mark) == (one.shared == other.shared)
    assert (ours.root("x") == theirs.root("x")) == (one.shared == other.shared)
