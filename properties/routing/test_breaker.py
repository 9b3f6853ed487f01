"""Whether an instance that failed is asked again, whatever it did and was asked."""

from __future__ import annotations

import math

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.runtime.caller.requests import Request
from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    OverloadedError,
    RemoteProtocolError,
    TrinamoError,
    UpstreamError,
)
from trinamo.runtime.protocol.discovery.presence import Liveness

INHIBIT_S, ERRORS_MAX, LONGEST_S = 5.0, 3, 60.0
deaths = st.sampled_from([ConnectError, DisconnectedError, RemoteProtocolError])


class BreakerMachine(RuleBasedStateMachine):
    """Requests that begin, end, are answered and fail, under a moving clock."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker, self.now = Liveness(10.0, errors_max=ERRORS_MAX), 0.0
        self.requests: list[Request] = []
        self.answers = self.errors = 0
        """In a row."""

    @property
    def is_asked(self) -> bool:
        return self.breaker.faulty_until <= self.now

    @rule(only_if_asked=st.booleans())
    def begin(self, only_if_asked: bool) -> None:
        """Where nobody else lives, an instance is asked though it is passed over."""
        if self.is_asked or not only_if_asked:
            self.requests.append(Request())
            self.breaker.begin(self.requests[-1])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.requests) - 1))
        self.breaker.end(self.requests.pop(at))

    @rule(kind=deaths)
    def die(self, kind: type[TrinamoError]) -> None:
        assert self.breaker.fail(kind("gone"), self.now, INHIBIT_S)
        assert not self.is_asked
        self.answers, self.errors = 0, self.errors + 1

    @rule()
    def err(self) -> None:
        was_asked = self.is_asked
        self.errors += 1
        self.answers = 0
        opened = self.breaker.fail(UpstreamError("500"), self.now, INHIBIT_S)
        assert opened or self.errors < ERRORS_MAX
        assert opened or self.is_asked == was_asked

    @rule()
    def be_full(self) -> None:
        """That is no fault."""
        before = self.breaker.faulty_until
        assert not self.breaker.fail(OverloadedError("full"), self.now, INHIBIT_S)
        assert self.breaker.faulty_until == before

    @rule()
    def answer(self) -> None:
        self.breaker.answer()
        self.answers, self.errors = self.answers + 1, 0
        assert self.is_asked

    @rule(seconds=st.integers(1, 100))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def it_is_not_given_up(self) -> None:
        """Passed over for a minute at the most, or while a request that is under way finds out."""
        until = self.breaker.faulty_until
        assert until <= self.now + LONGEST_S or (until == math.inf and self.requests)

    @invariant()
    def five_answers_make_it_whole(self) -> None:
        if self.answers >= 5:
            self.breaker.begin(Request())
            assert self.is_asked


TestBreaker = BreakerMachine.TestCase
