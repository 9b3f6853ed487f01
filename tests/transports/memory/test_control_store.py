"""The store's model, with the time as an argument. The shared behaviour is in the conformance
suite; here is what only the model can show: exact times, history, observers."""

from __future__ import annotations

import math

import pytest

from trinamo.runtime.errors import (
    CompactedError,
    ConnectError,
    ControlPlaneError,
    LeaseLostError,
)
from trinamo.runtime.planes import Delete, Put
from trinamo.transports.memory.store import Change, MemoryStore


def names(changes: object) -> list[str]:
    assert isinstance(changes, list)
    found: list[Change] = changes
    return [
        f"+{change.entry.key}" if isinstance(change, Put) else f"-{change.key}" for change in found
    ]


def test_a_lease_lives_to_its_last_moment_and_no_longer() -> None:
    store = MemoryStore()
    lease = store.grant_lease(5, now=100)
    store.put("a", b"", lease_id=lease.id, now=100)
    assert store.next_expiry == 105
    assert store.get("a", now=104.999) is not None
    assert store.get("a", now=105) is None
    assert store.next_expiry == math.inf


def test_a_keep_alive_starts_the_time_anew_but_revives_nobody() -> None:
    store = MemoryStore()
    lease = store.grant_lease(5, now=0)
    assert store.keep_alive(lease.id, now=4) == 5
    assert store.keep_alive(lease.id, now=8) == 5
    with pytest.raises(LeaseLostError):
        store.keep_alive(lease.id, now=13)


def test_a_lease_is_rounded_up_to_whole_seconds() -> None:
    assert MemoryStore().grant_lease(1.2, now=0).ttl_s == 2


def test_leases_due_together_end_in_the_order_of_their_deadlines() -> None:
    store = MemoryStore()
    late, early = store.grant_lease(3, now=0), store.grant_lease(2, now=0)
    store.put("late", b"", lease_id=late.id, now=0)
    store.put("early/2", b"", lease_id=early.id, now=0)
    store.put("early/1", b"", lease_id=early.id, now=0)
    before = store.revision
    changes, following = store.changes("", start_revision=before + 1, now=10)
    assert changes == [
        Delete("early/1", before + 1),
        Delete("early/2", before + 1),
        Delete("late", before + 2),
    ]
    assert following == before + 3


def test_a_key_moved_to_another_lease_leaves_the_first() -> None:
    store = MemoryStore()
    first, second = store.grant_lease(5, now=0), store.grant_lease(50, now=0)
    store.put("a", b"", lease_id=first.id, now=0)
    store.put("a", b"", lease_id=second.id, now=0)
    store.revoke_lease(first.id, now=1)
    assert store.get("a", now=1) is not None
    store.revoke_lease(second.id, now=2)
    assert store.get("a", now=2) is None


def test_a_lease_that_ends_with_its_keys_deleted_changes_nothing() -> None:
    store = MemoryStore()
    lease = store.grant_lease(5, now=0)
    store.put("a", b"", lease_id=lease.id, now=0)
    store.delete("a", now=0)
    revision = store.revision
    store.expire(100)
    assert store.revision == revision


def test_a_halted_store_answers_nothing_and_lets_no_lease_expire() -> None:
    store = MemoryStore()
    lease = store.grant_lease(5, now=0)
    store.put("a", b"", lease_id=lease.id, now=0)
    store.halt()
    assert store.next_expiry == math.inf
    with pytest.raises(ConnectError):
        store.get("a", now=1)
    store.restart(now=100)
    assert store.next_expiry == 105
    assert store.get("a", now=104) is not None


def test_history_is_read_in_steps() -> None:
    store = MemoryStore()
    for number in range(5):
        store.put(f"{'a' if number % 2 else 'b'}/{number}", b"", now=0)
    changes, following = store.changes("a/", start_revision=2, revisions_max=3, now=0)
    assert (names(changes), following) == (["+a/1"], 5)
    changes, following = store.changes("a/", start_revision=following, now=0)
    assert (names(changes), following) == (["+a/3"], 7)
    assert store.changes("a/", start_revision=following, now=0) == ([], 7)


def test_compacted_history_is_refused_with_its_revision() -> None:
    store = MemoryStore()
    for _ in range(5):
        store.put("a", b"", now=0)
    store.compact(4)
    with pytest.raises(CompactedError) as caught:
        store.changes("", start_revision=4, now=0)
    assert caught.value.compact_revision == 4
    assert len(store.changes("", start_revision=5, now=0)[0]) == 2
    store.compact()
    assert store.changes("", start_revision=7, now=0) == ([], 7)
    store.put("a", b"", now=0)
    assert len(store.changes("", start_revision=7, now=0)[0]) == 1


def test_history_is_bounded() -> None:
    store = MemoryStore(history_max=10)
    for _ in range(100):
        store.put("a", b"", now=0)
    with pytest.raises(CompactedError):
        store.changes("", start_revision=store.revision - 20, now=0)
    assert len(store.changes("", start_revision=store.revision - 9, now=0)[0]) == 10


def test_observers_hear_of_changes_while_they_observe() -> None:
    store = MemoryStore()
    heard = []
    with store.observe(lambda: heard.append(store.revision)):
        store.put("a", b"", now=0)
        store.delete("missing", now=0)
        store.delete("a", now=0)
    store.put("b", b"", now=0)
    assert heard == [2, 3]


def test_a_refused_write_takes_no_effect() -> None:
    store = MemoryStore(value_bytes_max=3)
    for key, value, lease_id in (("", b"", 0), ("a", b"1234", 0), ("a", b"", 77)):
        with pytest.raises(ControlPlaneError):
            store.put(key, value, lease_id=lease_id, now=0)
    assert store.revision == 1
