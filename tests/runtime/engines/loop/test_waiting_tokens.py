"""How much a scheduler says is still to be computed: what admission and routers go by."""

from __future__ import annotations

from tests.runtime.engines.loop.scheduling import make_scheduler, make_sequence, step


def test_what_is_still_to_be_computed_is_counted_but_not_what_others_fill() -> None:
    scheduler = make_scheduler(running_max=2, chunk_tokens_max=4)
    decoding, prefilling, waiting = make_sequence(3), make_sequence(9), make_sequence(5)
    for sequence in (decoding, prefilling, waiting):
        scheduler.submit(sequence)
    assert scheduler.waiting_tokens == 17
    step(scheduler)
    assert scheduler.waiting_tokens == 5 + 5
    scheduler.end(decoding)
    scheduler.end(waiting)
    while scheduler.waiting_tokens:
        step(scheduler)
    assert prefilling.pending_tokens == 1
    held = make_sequence(7)
    held.is_pinned = held.is_held = True
    scheduler.submit(held)
    assert scheduler.waiting_tokens == 0
    step(scheduler)
    assert (held.pending_tokens, scheduler.waiting_tokens) == (7, 0)
