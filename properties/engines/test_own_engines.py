"""An answer of an engine of one's own does not depend on how the generator cuts its text."""

from __future__ import annotations

from hypothesis import given, strategies as st

from trinamo import Delta, FinishReason, GenerateRequest
from trinamo.runtime.engines.own.items import AnswerItems
from trinamo.runtime.engines.text import StopMatcher

LETTERS = "abE"
pieces = st.lists(st.text(LETTERS, max_size=4), max_size=12)
stops = st.lists(st.text(LETTERS, min_size=1, max_size=3), max_size=3)


def answer(items: list[str], request: GenerateRequest) -> list[Delta]:
    taken = AnswerItems("own", request, 64)
    deltas: list[Delta] = []
    for item in items:
        delta = taken.take(item)
        deltas += [] if delta is None else [delta]
        if taken.is_over:
            return deltas
    return [*deltas, taken.finish()]


@given(pieces, stops, st.none() | st.integers(1, 8))
def test_the_text_the_counts_and_the_end_are_those_of_the_pieces(
    items: list[str], stop: list[str], tokens_max: int | None
) -> None:
    """The text is that of the first `max_tokens` pieces up to a stop string; a piece with text is a
    token; the prompt is told once, with the first delta; one delta, the last, has a reason."""
    deltas = answer(items, GenerateRequest(model="m", prompt="p", max_tokens=tokens_max, stop=stop))

    told = [item for item in items if item][:tokens_max]
    matcher = StopMatcher(stop)
    expected = matcher.push("".join(told)) + matcher.flush()
    assert "".join(delta.text for delta in deltas) == expected
    tokens = sum(len(delta.token_ids) for delta in deltas)
    assert tokens == len(told) if not matcher.is_stopped else tokens <= len(told)
    assert [delta.prompt_tokens for delta in deltas] == [1] + [0] * (len(deltas) - 1)
    assert [delta.finish_reason is None for delta in deltas[:-1]] == [True] * (len(deltas) - 1)
    is_full = tokens_max is not None and len(told) == tokens_max
    assert deltas[-1].finish_reason is (
        FinishReason.LENGTH if is_full and not matcher.is_stopped else FinishReason.STOP
    )
