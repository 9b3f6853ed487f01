"""The breaker of one instance, by hand; whatever else happens, `properties/routing/test_breaker.py`."""

from __future__ import annotations

from tests.runtime.caller.requests import Request
from tests.runtime.caller.tables import Table, instance
from trinamo.runtime.errors import DisconnectedError, UpstreamError
from trinamo.runtime.protocol.discovery.presence import Liveness

A, B = instance(1), instance(2)
GONE = DisconnectedError("gone")


async def test_one_request_finds_out_whether_an_instance_lives_again() -> None:
    """While it is under way, all others go elsewhere."""
    table = Table(A, B)
    table.fault(A, lasts_s=5)
    assert table.candidates(5) == [A, B]
    probe = Request()
    table.begin(A.id, probe)
    assert table.candidates(5) == [B]
    table.answer(table.record(A))
    assert table.candidates(5) == [A, B]
    table.end(A.id, probe)
    assert table.candidates(5) == [A, B]


async def test_a_probe_that_ends_without_an_answer_leaves_the_turn_to_another() -> None:
    table = Table(A, B)
    table.fault(A, lasts_s=5)
    probe = Request()
    table.begin(A.id, probe)
    table.end(A.id, probe)
    assert table.candidates(5) == [A, B]


def test_each_failure_doubles_the_time_up_to_a_minute() -> None:
    breaker, now, waits = Liveness(10.0, errors_max=3), 0.0, []
    for _ in range(6):
        breaker.fail(GONE, now, 5)
        waits.append(breaker.faulty_until - now)
        now = breaker.faulty_until

    assert waits == [5, 10, 20, 40, 60, 60]


def test_many_requests_that_one_failure_took_along_are_one() -> None:
    breaker = Liveness(10.0, errors_max=3)
    for _ in range(64):
        breaker.fail(GONE, 0, 5)
    assert breaker.faulty_until == 5


def test_as_many_answers_as_failures_close_it() -> None:
    breaker = Liveness(10.0, errors_max=3)
    for now in (0, 5, 15):
        breaker.fail(GONE, now, 5)
    for _ in range(2):
        breaker.answer()
        assert breaker.begin(Request())
    breaker.answer()
    assert not breaker.begin(Request())


def test_errors_that_an_instance_answers_with_open_it_in_a_row_only() -> None:
    """One request that nobody can answer would have all of them passed over."""
    breaker, error = Liveness(10.0, errors_max=3), UpstreamError("500")
    assert [breaker.fail(error, 0, 5) for _ in range(2)] == [False, False]
    breaker.answer()
    assert [breaker.fail(error, 0, 5) for _ in range(3)] == [False, False, True]
    # Half open, one is enough.
    assert breaker.fail(error, 5, 5)
