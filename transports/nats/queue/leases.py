"""The register of a work queue's leases: one record per job id, changed only by its last reader."""

from __future__ import annotations

from typing import Final

import attrs
import trio

from trinamo.runtime.errors import EventPlaneError

from .api import WRONG_LAST_SEQUENCE, JetStream, JetStreamError
from .records import Delivery, Record, RecordState, StreamNames, decode_record, encode_record

TRIES_MAX: Final = 8
_EXPECT: Final = "Nats-Expected-Last-Subject-Sequence"


@attrs.define(eq=False)
class Held:
    """A lease of ours."""

    delivery: Delivery
    record: Record
    revision: int
    until: float
    """When it has expired for certain, on trio's clock."""

    def may_become(self, state: RecordState) -> bool:
        if self.record.state != "leased":
            return self.record.state == state  # Settled so already, but not to the end.
        return trio.current_time() < self.until


class Leases:
    """Compare-and-set over a stream: a record's revision is the sequence of its message."""

    def __init__(self, stream: JetStream, names: StreamNames) -> None:
        self._stream = stream
        self._names = names

    async def read(self, job_id: str, *, deadline: float) -> tuple[Record | None, int]:
        """The last record of `job_id` and its revision; None and 0 if there is none.

        Asked of the stream's leader, so it is the last one.
        """
        query = {"last_by_subj": self._names.lease_subject(job_id)}
        found = await self._stream.message(self._names.leases, query, deadline=deadline)
        return (None, 0) if found is None else (decode_record(found.payload), found.sequence)

    async def write(
        self, job_id: str, record: Record, revision: int, *, deadline: float
    ) -> int | None:
        """Put `record` on top of `revision`; its own revision, or None if another was there.

        A write whose answer was lost is found by its token and state when it is tried again, and
        so is an extension of the same lease by another task, on top of which it goes then.
        """
        for _ in range(TRIES_MAX):
            try:
                stored, _ = await self._stream.store(
                    self._names.lease_subject(job_id),
                    encode_record(record),
                    {_EXPECT: str(revision)},
                    deadline=deadline,
                )
                return stored.seq
            except JetStreamError as error:
                if error.error_code != WRONG_LAST_SEQUENCE:
                    raise
            found, revision = await self.read(job_id, deadline=deadline)
            if found is None or found.token != record.token:
                return None
            if found.state == record.state:
                return revision
            if found.state != "leased":
                return None
        raise EventPlaneError(f"the record of job {job_id} keeps changing", definite=True)
