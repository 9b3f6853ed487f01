"""What the instances of one endpoint say of themselves over the event plane: load, and state.

Only under the policies that ask for it (`TOLD_LOAD`); the worker's end is `worker/reports.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from ..events.follower import ReportFollower
from ..events.load import LoadReport
from ..events.source import topic_of
from ..events.status import WorkerState
from ..nurseries import open_nursery
from ..planes import EventPlane
from ..protocol.discovery.instances import EndpointName
from .record import InstanceRecord


class InstanceReports:
    """Follows the reports of instances that `find` knows, and writes them into their records.

    `on_draining` is called with the record of one that has said that it drains.
    """

    def __init__(
        self,
        events: EventPlane,
        endpoint: EndpointName,
        find: Callable[[str], InstanceRecord | None],
        on_draining: Callable[[InstanceRecord], None],
    ) -> None:
        self._find, self._on_draining = find, on_draining

        def follows(instance_id: str) -> bool:
            return find(instance_id) is not None

        self.loads = ReportFollower(
            events, topic_of("load", endpoint), LoadReport, follows=follows, take=self._take_load
        )
        self.states = ReportFollower(
            events,
            topic_of("status", endpoint),
            WorkerState,
            follows=follows,
            take=self._take_state,
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow until cancelled."""
        async with open_nursery() as nursery:
            await nursery.start(self.loads.follower.run)
            await nursery.start(self.states.follower.run)
            task_status.started()

    def forget(self, instance_id: str) -> None:
        """The instance has left."""
        self.loads.follower.forget(instance_id)
        self.states.follower.forget(instance_id)

    def _take_load(self, instance_id: str, report: LoadReport) -> None:
        record = self._find(instance_id)
        if record is not None:
            record.report, record.reported_at = report, trio.current_time()

    def _take_state(self, instance_id: str, state: WorkerState) -> None:
        record = self._find(instance_id)
        if record is not None and state is WorkerState.DRAINING:
            self._on_draining(record)
