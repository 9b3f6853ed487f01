"""Credit, both ends: what is sent is what was granted, however the messages between them are delayed."""

from __future__ import annotations

from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.protocol.streams.credit import ReceiveCredit, SendCredit

WINDOW = 1000
LONGEST = 4000


class CreditBetweenTwoEnds(RuleBasedStateMachine):
    """Never more than a window and one item is under way or unread; nothing is given twice or lost."""

    def __init__(self) -> None:
        super().__init__()
        self.sender, self.reader = SendCredit(WINDOW), ReceiveCredit(WINDOW)
        self.wire: list[bytes] = []
        self.grants: list[int] = []
        self.unread: list[bytes] = []

    @precondition(lambda self: self.sender.left_bytes > 0)
    @rule(size=st.integers(1, LONGEST))
    def send(self, size: int) -> None:
        assert self.sender.spend(size) is (self.sender.left_bytes > 0)
        self.wire.append(bytes(size))

    @precondition(lambda self: self.wire)
    @rule(count=st.integers(1, 4))
    def arrive(self, count: int) -> None:
        items, self.wire = self.wire[:count], self.wire[count:]
        assert self.reader.arrive(items)
        self.unread += items

    @precondition(lambda self: self.unread)
    @rule()
    def read(self) -> None:
        given = self.reader.take(len(self.unread.pop(0)))
        if given:
            assert given * 2 >= WINDOW
            self.grants.append(given)

    @precondition(lambda self: self.grants)
    @rule()
    def granted(self) -> None:
        self.sender.grant(self.grants.pop(0))

    @invariant()
    def credit_is_never_negative_beyond_one_item(self) -> None:
        for end in (self.sender, self.reader):
            assert -LONGEST < end.left_bytes <= WINDOW

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        under_way = sum(map(len, self.wire))
        assert self.reader.held_bytes == sum(map(len, self.unread))
        assert self.sender.left_bytes + sum(self.grants) + under_way == self.reader.left_bytes

    @invariant()
    def a_stream_that_is_read_never_stands_still(self) -> None:
        if not (self.wire or self.unread or self.grants):
            assert self.sender.left_bytes > 0


TestCreditBetweenTwoEnds = CreditBetweenTwoEnds.TestCase


@given(st.lists(st.integers(1, LONGEST), min_size=1, max_size=8))
def test_an_item_without_credit_is_noticed(sizes: list[int]) -> None:
    """In one batch or one by one, exactly the items after the credit was used up are without it."""
    one_by_one, together = ReceiveCredit(WINDOW), ReceiveCredit(WINDOW)
    within = [one_by_one.arrive([bytes(size)]) for size in sizes]
    assert within == [sum(sizes[:n]) < WINDOW for n in range(len(sizes))]
    assert together.arrive([bytes(size) for size in sizes]) is all(within)


@given(st.integers(-5, 3 * WINDOW), st.lists(st.integers(1, LONGEST), max_size=3))
def test_credit_that_was_never_spent_is_refused(given_bytes: int, sizes: list[int]) -> None:
    """Given twice, or out of nothing, it is the peer's fault; and changes nothing."""
    sender = SendCredit(WINDOW)
    for size in sizes:
        if sender.left_bytes > 0:
            sender.spend(size)
    spent = WINDOW - sender.left_bytes
    try:
        sender.grant(given_bytes)
    except RemoteProtocolError:
        assert not 0 < given_bytes <= spent
        assert sender.left_bytes == WINDOW - spent
    else:
        assert 0 < given_bytes <= spent
        assert sender.left_bytes == WINDOW - spent + given_bytes
