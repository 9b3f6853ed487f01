"""Whose cells are whose, over a context that only counts them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, strategies as st

from trinamo.runtime.engines.llamacpp.sequences import KEPT_MAX, SEQUENCES_MAX, Sequences

SLOTS = 3
ROOM = 10_000


class Cells:
    """What llama.cpp's memory would hold: the tokens of each sequence."""

    def __init__(self, room: int) -> None:
        self.of: dict[int, list[int]] = defaultdict(list)
        self.room = room

    @property
    def held(self) -> list[list[int]]:
        return [each for each in self.of.values() if each]

    def get_state_seq_data(self, sequence: int) -> bytes:
        return bytes(self.of[sequence])

    def set_state_seq_data(self, state: bytes, sequence: int) -> None:
        assert self.of[sequence] == []
        if sum(len(each) for each in self.held) + len(state) > self.room:
            raise ValueError("no cells are free")
        self.of[sequence] = list(state)

    def memory_seq_cp(self, source: int, target: int, start: int, end: int) -> None:
        assert (start, self.of[target]) == (0, [])
        self.of[target] = self.of[source][:end]
        assert len(self.of[target]) == end, "it has less than it says"

    def memory_seq_rm(self, sequence: int, start: int, end: int) -> None:
        if sequence == -1:
            self.of.clear()
        else:
            self.of.pop(sequence, None)


def make(
    running_max: int = SLOTS, *, room: int = ROOM, tokens_max: int = ROOM
) -> tuple[Sequences, Cells]:
    cells = Cells(room)
    made: Any = cells
    return Sequences(made, running_max, tokens_max), cells


def compute(sequences: Sequences, cells: Cells, slot: int, token_ids: list[int]) -> None:
    """A step: what the sequence of `slot` has not yet."""
    held = sequences.of(slot)
    assert cells.of[held.id] == held.token_ids == token_ids[: len(held.token_ids)]
    cells.of[held.id] += token_ids[len(held.token_ids) :]
    held.token_ids += token_ids[len(held.token_ids) :]


def test_a_prompt_that_comes_again_is_found_but_for_its_last_token() -> None:
    sequences, cells = make()
    assert sequences.begin(0, [1, 2, 3, 4], "") == 0
    compute(sequences, cells, 0, [1, 2, 3, 4, 9])
    assert sequences.begin(1, [1, 2, 3, 4], "") == 3
    sequences.release(0)
    assert sequences.begin(2, [1, 2, 3, 4, 9, 5], "") == 5
    assert sequences.begin(0, [2, 3], "") == 0


def test_a_tenant_finds_nothing_of_another() -> None:
    sequences, cells = make()
    sequences.begin(0, [1, 2, 3], "a")
    compute(sequences, cells, 0, [1, 2, 3])
    assert (sequences.find([1, 2, 3], "b"), sequences.find([1, 2, 3], "a")) == (0, 2)
    sequences.release(0)
    assert (sequences.find([1, 2, 3], "b"), sequences.find([1, 2, 3], "")) == (0, 0)


def test_a_slot_may_be_begun_before_its_last_owner_is_released() -> None:
    sequences, cells = make(running_max=1)
    sequences.begin(0, [1, 2, 3], "")
    compute(sequences, cells, 0, [1, 2, 3])
    assert sequences.begin(0, [1, 2, 4], "") == 2
    sequences.release(0)
    compute(sequences, cells, 0, [1, 2, 4])
    assert sequences.find([1, 2, 3, 5], "") == 3


def ask(sequences: Sequences, cells: Cells, token_ids: list[int]) -> int:
    """Run one alone; how much of it was there."""
    count = sequences.begin(0, token_ids, "")
    compute(sequences, cells, 0, token_ids)
    sequences.release(0)
    return count


def test_of_conversations_the_longest_stays_and_the_last_ones() -> None:
    sequences, cells = make()
    turns = [*range(3 * KEPT_MAX)]
    for end in range(2, len(turns) + 1):
        assert ask(sequences, cells, turns[:end]) == (0 if end == 2 else end - 1)
    assert cells.held == [turns]
    for first in range(KEPT_MAX):
        ask(sequences, cells, [first, 200])
    assert sequences.find(turns, "") == 1
    assert all(sequences.find([first, 200, 2], "") == 2 for first in range(KEPT_MAX))


def test_all_tokens_that_are_kept_have_a_bound() -> None:
    sequences, cells = make(tokens_max=6)
    for first in range(4):
        ask(sequences, cells, [first, 100])
    assert [sequences.find([first, 100, 1], "") for first in range(4)] == [0, 2, 2, 2]


def test_a_step_has_no_cells_of_others_to_look_at_but_the_last_one_s() -> None:
    sequences, cells = make()
    for first in range(5):
        ask(sequences, cells, [first, 100, 101])
        assert len(cells.held) <= 2
    compute(sequences, cells, 1, [9])
    assert sorted(cells.held) == [[4, 100, 101], [9]]
    assert sequences.begin(2, [2, 100, 7], "") == 2
    compute(sequences, cells, 2, [2, 100, 7])
    assert sorted(cells.held) == [[2, 100, 7], [2, 100, 101], [9]]
    assert sequences.find([4, 100, 101, 5], "") == 3


def test_what_finds_no_cells_is_computed_again() -> None:
    sequences, cells = make(room=8)
    ask(sequences, cells, [1, 2, 3, 4])
    ask(sequences, cells, [5])
    compute(sequences, cells, 1, [6, 7, 8, 9, 10])
    assert sequences.begin(2, [1, 2, 3, 4, 5], "") == 0
    compute(sequences, cells, 2, [1, 2])
    sequences.release(1)
    sequences.release(2)
    # Those of the others that only may come again are put away for it.
    assert sequences.begin(0, [1, 2, 3, 4, 5], "") == 4
    compute(sequences, cells, 0, [1, 2, 3, 4, 5])
    sequences.release(0)
    assert ask(sequences, cells, [6, 7, 8, 9, 10, 11]) == 5


def test_kv_that_came_without_its_tokens_is_found_by_nobody() -> None:
    sequences, cells = make()
    held = sequences.of(0)
    held.is_known = False
    cells.of[held.id] = [1, 2, 3]
    assert sequences.find([1, 2, 3], "") == 0
    sequences.release(0)
    assert not any(cells.of.values())


def test_more_slots_than_llama_cpp_has_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 256 sequences"):
        make(SEQUENCES_MAX + 1)


@pytest.mark.parametrize("running_max", [1, SEQUENCES_MAX - 1, SEQUENCES_MAX])
def test_every_slot_has_a_sequence_whatever_is_kept(running_max: int) -> None:
    sequences, cells = make(running_max)
    for _ in range(2):
        for slot in range(running_max):
            sequences.begin(slot, [1, slot], "")
            if sequences.find([1, slot], ""):
                sequences.release(slot)
            compute(sequences, cells, slot, [1, slot])
        assert len({sequences.of(slot).id for slot in range(running_max)}) == running_max
        for slot in range(running_max):
            sequences.release(slot)


@given(
    st.lists(
        st.tuples(
            st.integers(0, SLOTS - 1),
            st.lists(st.integers(0, 1), min_size=1, max_size=5),
            st.sampled_from("ab"),
        )
    )
)
def test_what_a_slot_has_is_what_its_owner_would_have_computed(
    owners: list[tuple[int, list[int], str]],
) -> None:
    """Invariant: whoever comes, goes and is kept, a sequence's cells hold its own tokens, and no other's."""
    sequences, cells = make()
    busy: set[int] = set()
    for slot, token_ids, tenant in owners:
        count = sequences.begin(slot, token_ids, tenant)
        assert 0 <= count < len(token_ids)
        if slot in busy:
            sequences.release(slot)
        busy.add(slot)
        compute(sequences, cells, slot, token_ids)
        for other in range(SLOTS):
            if other in busy:
                held = sequences.of(other)
                assert cells.of[held.id] == held.token_ids
    sequences.clear()
    assert sequences.find([0, 0], "a") == 0
