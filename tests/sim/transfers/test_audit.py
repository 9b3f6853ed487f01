"""The books of a pool say what its own counts cannot: who owns a block, and who may still touch it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from trinamo.runtime.kv.pool import BlockPool
from trinamo.runtime.planes import Transfer
from trinamo.sim.errors import Violation
from trinamo.sim.transfers.audit import BlockAudit, WatchedPlane


class Moving:
    """As much of a transfer as the audit looks at."""

    is_settled = False


class Plane:
    """A plane that starts whatever it is given last."""

    backend = "stub"

    def __init__(self) -> None:
        self.started: list[Moving] = []

    def start(self, *_: object, **__: object) -> Moving:
        self.started.append(Moving())
        return self.started[-1]


def moving(audit: BlockAudit, blocks: Sequence[int]) -> Moving:
    transfer = Moving()
    audit.moves(cast("Transfer", transfer), blocks)
    return transfer


def lent(audit: BlockAudit, owner: str, count: int = 2) -> list[int]:
    blocks = audit.pool.take(count)
    assert blocks is not None
    audit.taken(blocks, owner)
    return blocks


def test_a_block_that_a_transfer_may_touch_must_not_be_lent() -> None:
    audit = BlockAudit("a", BlockPool(4))
    blocks = lent(audit, "first")
    transfer = moving(audit, blocks)
    audit.pool.give_back(blocks)
    audit.returned(blocks)
    with pytest.raises(Violation, match="while the transfer of first may touch it") as caught:
        lent(audit, "second")
    assert caught.value.invariant == "I9"
    assert not transfer.is_settled


def test_a_settled_transfer_forbids_nothing() -> None:
    audit = BlockAudit("a", BlockPool(2))
    blocks = lent(audit, "first")
    transfer = moving(audit, blocks)
    assert [id(each) for each in audit.transfers_of("first")] == [id(transfer)]
    audit.pool.give_back(blocks)
    audit.returned(blocks)
    transfer.is_settled = True
    assert audit.transfers_of("first") == []
    assert sorted(lent(audit, "second")) == sorted(blocks)


def test_a_block_with_two_owners_is_a_violation() -> None:
    audit = BlockAudit("a", BlockPool(4))
    blocks = lent(audit, "first")
    with pytest.raises(Violation, match="of first is lent to second"):
        audit.taken(blocks, "second")


def test_free_blocks_that_somebody_owns_are_a_violation() -> None:
    audit = BlockAudit("a", BlockPool(4))
    blocks = lent(audit, "first", 3)
    audit.pool.give_back(blocks)
    with pytest.raises(Violation, match="4 are free, but 3 have owners"):
        audit.count()


def test_a_watched_plane_tells_of_every_start_and_is_the_plane_otherwise() -> None:
    audit, plane = BlockAudit("a", BlockPool(4)), Plane()
    watched = WatchedPlane(cast("object", plane), audit)  # type: ignore[arg-type]
    blocks = lent(audit, "first")
    watched.start("read", None, blocks, None, blocks, deadline_s=1)
    assert watched.backend == "stub"
    assert [id(each) for each in audit.transfers_of("first")] == [id(plane.started[0])]
