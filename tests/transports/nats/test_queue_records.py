"""The judgement of a delivery by its record, and the texts JetStream gives us to read."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.planes import QueueLimits
from trinamo.transports.nats.queue.api import StreamInfo
from trinamo.transports.nats.queue.records import (
    Bury,
    Drop,
    JobDelivery,
    Leave,
    Record,
    StreamNames,
    TakeJob,
    dead_headers,
    decode_record,
    encode_record,
    judge,
    parse_delivery,
    queue_limits,
    read_dead_headers,
    stream_configs,
)

S = 1_000_000_000
LIMITS = QueueLimits(attempts_max=3, duplicate_window_s=10)
DELIVERY = JobDelivery("job", b"", "ack", number=7, delivered=1, put_ns=100 * S, is_requeued=False)
RECORD = Record(state="leased", job=7, attempt=1, token="t", put_ns=100 * S)


def record(**changes: Any) -> Record:
    return msgspec.structs.replace(RECORD, **changes)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (None, TakeJob(1)),
        (record(attempt=2), TakeJob(3)),
        (record(state="waiting"), TakeJob(2)),
        (record(attempt=3), Bury(3, "its last lease expired", is_recorded=False)),
        (record(state="dead", attempt=3, reason="r"), Bury(3, "r", is_recorded=True)),
        (record(state="done"), Drop()),
        # Somebody has been given it since.
        (record(delivered=2), Leave()),
        (record(state="waiting", delivered=2), Leave()),
        (record(state="done", delivered=2), Drop()),
        (record(delivered=1), TakeJob(2)),
        # Another put of the id: a copy within the window, a job of its own after it.
        (record(state="done", job=3, put_ns=95 * S), Drop()),
        (record(state="dead", job=3, put_ns=95 * S), Drop()),
        (record(state="done", job=3, put_ns=80 * S), TakeJob(1)),
        (record(state="leased", job=3, put_ns=95 * S, delivered=2), TakeJob(1)),
    ],
)
def test_the_record_decides_what_becomes_of_a_delivery(
    found: Record | None, verdict: TakeJob | Bury | Drop | Leave
) -> None:
    assert judge(DELIVERY, found, LIMITS) == verdict


def test_a_requeued_job_is_no_copy_of_its_dead_self() -> None:
    requeued = JobDelivery("job", b"", "ack", 7, 1, 100 * S, is_requeued=True)
    assert judge(requeued, record(state="dead", job=3), LIMITS) == TakeJob(1)


@pytest.mark.parametrize(
    "reply",
    ["$JS.ACK.s.c.2.7.9.1234.0", "$JS.ACK._.hash.s.c.2.7.9.1234.0.random"],
)
def test_both_forms_of_an_acknowledgement_subject_are_read(reply: str) -> None:
    found = parse_delivery("trinamo.queue.q.job.x-1", b"p", reply, {})
    assert (found.job_id, found.delivered, found.number, found.put_ns) == ("x-1", 2, 7, 1234)


@pytest.mark.parametrize("reply", ["", "$JS.ACK", "$JS.ACK.s.c.a.b.c.d.e", "a.b.s.c.1.2.3.4.5"])
def test_other_replies_are_no_deliveries(reply: str) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_delivery("subject", b"", reply, {})


def test_records_and_dead_letters_survive_their_encoding() -> None:
    assert decode_record(encode_record(RECORD)) == RECORD
    assert read_dead_headers(dead_headers(3, "so: é\r\n%")) == (3, "so: é\r\n%")
    assert read_dead_headers({}) == (0, "")
    for value in (b"", b"{}", b"\xff", b'{"state":"odd"}'):
        with pytest.raises(RemoteProtocolError):
            decode_record(value)


def test_a_queue_s_records_are_kept_as_long_as_its_leases_and_copies_need_them() -> None:
    def age_s(**limits: float) -> float:
        _, leases, _ = stream_configs(StreamNames("q"), QueueLimits(**limits), replicas=1)  # type: ignore[arg-type]
        return float(leases["max_age"] / S)

    assert age_s() == 7200
    assert age_s(remembered_s=10, visibility_timeout_s=30, duplicate_window_s=20) == 60
    assert age_s(remembered_s=10, visibility_timeout_s=30, duplicate_window_s=90) == 180
    assert queue_limits('{"remembered_s": 120.0}').remembered_s == 120


def test_limits_that_cannot_be_read_are_the_defaults() -> None:
    for description in ("", "[]", "{", '{"attempts_max": "many"}', '{"attempts_max": -1}'):
        assert queue_limits(description) == QueueLimits()


def test_a_queue_is_known_by_its_stream() -> None:
    assert StreamNames.queue_of(StreamNames("a-jobs").jobs) == "a-jobs"
    assert StreamNames.queue_of("orders") is None
    assert StreamNames.queue_of("trinamo-queue-a-leases") is None


@pytest.mark.parametrize(
    ("first_ts", "first_s"),
    [
        ("1970-01-01T00:00:01Z", 1),
        ("1970-01-01T00:00:01.250000000Z", 1.25),
        ("1970-01-01T01:00:01.5+01:00", 1.5),
    ],
)
def test_the_age_of_a_queue_is_by_the_servers_time_stamps(first_ts: str, first_s: float) -> None:
    told = {"config": {}, "state": {"messages": 1, "first_ts": first_ts}}
    assert msgspec.convert(told, StreamInfo).age_s(11) == 11 - first_s


def test_a_queue_that_is_empty_has_no_age() -> None:
    never = {"config": {}, "state": {"messages": 0, "first_ts": "0001-01-01T00:00:00Z"}}
    assert msgspec.convert(never, StreamInfo).age_s(11) == 0
