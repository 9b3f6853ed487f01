"""The map of holders is what a set for each holder would be, whatever is stored, removed and forgotten."""

from __future__ import annotations

import attrs
from hypothesis import given, strategies as st

from trinamo.runtime.protocol.kv.holders import BlockHolders

# Chains of one tree: the block at depth d of branch b shares its first blocks with other branches.
DEPTH, BRANCHES, HOLDERS, BLOCKS_MAX = 12, 4, 3, 20


def chain(branch: int, depth: int) -> list[int]:
    """The first blocks of a branch; branch b leaves the others behind block 3·b."""
    return [1000 * (branch if at >= 3 * branch else 0) + at + 1 for at in range(depth)]


HOLDER = st.integers(0, HOLDERS - 1)
CHAIN = st.builds(chain, st.integers(0, BRANCHES - 1), st.integers(1, DEPTH))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), HOLDER, CHAIN),
        st.tuples(st.just("store"), HOLDER, CHAIN),
        st.tuples(st.just("remove"), HOLDER, CHAIN),
        st.tuples(st.just("leave"), HOLDER, st.just([0])),
        st.tuples(st.just("sweep"), HOLDER, st.lists(st.just(0), max_size=300)),
    ),
    max_size=40,
)


@attrs.define
class Holder:
    """What is true of one: its bit, and its blocks in a set."""

    bit: int
    held: set[int] = attrs.Factory(set)


@given(STEPS)
def test_the_map_equals_one_set_for_each_holder(steps: list[tuple[str, int, list[int]]]) -> None:
    """For any events, bounds included: equal blocks and counts, and nothing of who left.

    Who left is gone from the map once it is swept, and a bit that is given again begins empty.
    """
    blocks = BlockHolders()
    holders = [Holder(blocks.join()) for _ in range(HOLDERS)]
    for kind, number, keys in steps:
        holder = holders[number]
        if kind == "store":
            refused = blocks.store(holder.bit, keys, BLOCKS_MAX)
            new = [key for key in keys if key not in holder.held]
            room = BLOCKS_MAX - len(holder.held)
            assert refused == max(len(new) - room, 0)
            holder.held.update(new[:room])
        elif kind == "remove":
            # From somewhere on, as a cache evicts leaves first; or all of a branch.
            gone = keys[len(keys) // 2 :]
            blocks.remove(holder.bit, gone)
            holder.held.difference_update(gone)
        elif kind == "leave":
            blocks.leave(holder.bit)
            holders[number] = Holder(blocks.join())
        elif blocks.is_dirty:
            for _ in keys:
                blocks.sweep()
        for each in holders:
            assert blocks.blocks(each.bit) == each.held
            assert blocks.count(each.bit) == len(each.held)
    while blocks.is_dirty:
        blocks.sweep()
    assert len(blocks) == len(set().union(*(each.held for each in holders)))


@given(
    st.lists(st.tuples(HOLDER, CHAIN), max_size=8),
    CHAIN,
)
def test_bisection_finds_what_counting_finds(
    stored: list[tuple[int, list[int]]], asked: list[int]
) -> None:
    """Where every holder has the parents of what it has: the depth is the number of leading blocks."""
    blocks = BlockHolders()
    bits = [blocks.join() for _ in range(HOLDERS)]
    held: dict[int, set[int]] = {bit: set() for bit in bits}
    for number, keys in stored:
        blocks.store(bits[number], keys, 1000)
        held[bits[number]].update(keys)
    found: dict[int, int] = {}
    for mask, depth in blocks.depths(asked):
        for bit in bits:
            if mask & bit:
                assert bit not in found
                found[bit] = depth
    expected = {bit: _leading(asked, held[bit]) for bit in bits}
    assert found == {bit: depth for bit, depth in expected.items() if depth}


def _leading(asked: list[int], held: set[int]) -> int:
    return next((at for at, key in enumerate(asked) if key not in held), len(asked))
