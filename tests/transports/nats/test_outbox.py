"""The bounded queue in front of the connection."""

from __future__ import annotations

import pytest

from trinamo.runtime.errors import OverloadedError
from trinamo.transports.nats.outbox import Interest, Outbox, Publication


def message(name: str, size: int = 1) -> Publication:
    return Publication(name, b"", "", {}, size)


def interest() -> Interest:
    return Interest("a.*", "", lambda _: None, lambda: None)


def test_messages_and_changes_leave_in_the_order_they_came() -> None:
    outbox = Outbox(messages_max=10, bytes_max=100)
    first, change, second = message("a"), interest(), message("b")
    outbox.put(first)
    outbox.put_change(change)
    outbox.put(second)
    assert [outbox.take() for _ in range(4)] == [first, change, second, None]
    assert (outbox.message_count, outbox.message_bytes, len(outbox)) == (0, 0, 0)


def test_the_bound_on_messages_refuses_and_counts() -> None:
    outbox = Outbox(messages_max=2, bytes_max=100)
    outbox.put(message("a"))
    outbox.put(message("b"))
    with pytest.raises(OverloadedError) as caught:
        outbox.put(message("c"))
    assert (caught.value.bound, caught.value.value) == ("outgoing_messages_max", 2)
    assert outbox.dropped == 1
    outbox.put_change(interest())


def test_the_bound_on_bytes_refuses_and_counts() -> None:
    outbox = Outbox(messages_max=10, bytes_max=10)
    outbox.put(message("a", 6))
    with pytest.raises(OverloadedError) as caught:
        outbox.put(message("b", 5))
    assert (caught.value.bound, caught.value.value) == ("outgoing_bytes_max", 10)
    outbox.put(message("c", 4))


def test_a_withdrawn_message_does_not_leave_and_frees_its_room() -> None:
    outbox = Outbox(messages_max=1, bytes_max=100)
    unwanted, wanted = message("a"), message("b")
    outbox.put(unwanted)
    assert outbox.withdraw(unwanted)
    assert not outbox.withdraw(unwanted)
    outbox.put(wanted)
    assert outbox.take() is wanted
    assert outbox.take() is None


def test_a_message_that_left_cannot_be_withdrawn_and_is_not_put_back_then() -> None:
    outbox = Outbox(messages_max=10, bytes_max=100)
    given_up, wanted = message("a"), message("b")
    for each in (given_up, wanted):
        outbox.put(each)
        assert outbox.take() is each
    assert not outbox.withdraw(given_up)
    outbox.put_back(given_up)
    outbox.put_back(wanted)
    assert outbox.message_count == 1
    assert outbox.take() is wanted
    assert outbox.take() is None


def test_what_is_put_back_goes_first() -> None:
    outbox = Outbox(messages_max=10, bytes_max=100)
    first, second = message("a"), message("b")
    outbox.put(first)
    outbox.put(second)
    taken = outbox.take()
    assert taken is first
    outbox.put_back(first)
    assert outbox.take() is first


def test_withdrawn_messages_do_not_pile_up() -> None:
    outbox = Outbox(messages_max=10, bytes_max=100)
    kept = message("kept")
    outbox.put(kept)
    for number in range(10_000):
        unwanted = message(str(number))
        outbox.put(unwanted)
        outbox.withdraw(unwanted)
        assert len(outbox) <= 130
    assert outbox.take() is kept
    assert outbox.take() is None


def test_clearing_counts_the_messages_as_dropped() -> None:
    outbox = Outbox(messages_max=10, bytes_max=100)
    outbox.put(message("a"))
    outbox.put_change(interest())
    outbox.put(message("b"))
    assert outbox.clear() == 2
    assert (outbox.dropped, outbox.message_count, outbox.message_bytes) == (2, 0, 0)
    assert outbox.take() is None
