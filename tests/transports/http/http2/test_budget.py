"""What frames cost, wherever the bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from tests.transports.http.http2.client import DATA, PING, RESET, frame
from trinamo.transports.http.http2.connection import FrameBudget

pytestmark = pytest.mark.check

RESETS_UNTIL_SPENT = 201


@given(st.lists(st.integers(1, 400), max_size=30))
def test_frames_cost_the_same_wherever_their_bytes_are_cut(cuts: list[int]) -> None:
    """The count sees one frame for each frame, and none in what a frame carries."""
    inside = frame(RESET, 1, bytes(4)) * 20
    data = (frame(DATA, 1, inside) + frame(RESET, 1, bytes(4))) * (RESETS_UNTIL_SPENT - 1)
    budget = FrameBudget(0.0)
    for cut in cuts:
        budget.count(data[:cut], 0.0)
        data = data[cut:]
    budget.count(data, 0.0)
    assert not budget.is_spent
    budget.count(frame(RESET, 1, bytes(4)), 0.0)
    assert budget.is_spent


def test_time_pays_back_but_saves_nothing_up() -> None:
    budget = FrameBudget(0.0)
    for second in range(1, 100):
        budget.count(frame(PING, 0, bytes(8)) * 100, float(second))
    assert not budget.is_spent
    budget.count(frame(PING, 0, bytes(8)) * 1_001, 1e6)
    assert budget.is_spent
