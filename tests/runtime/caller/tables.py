"""A table of instances without a router, on a clock that is set by hand."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

from trinamo.runtime.caller.instances import Instances
from trinamo.runtime.caller.record import InstanceRecord, InstanceStatus
from trinamo.runtime.env import Clock
from trinamo.runtime.errors import DisconnectedError
from trinamo.runtime.metrics.metrics import Metrics
from trinamo.runtime.protocol.discovery.instances import EndpointName, Instance


class HandClock:
    """It shows what it was set to."""

    at = 0.0

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.at


class HandEnv:
    def __init__(self) -> None:
        self.hand = HandClock()
        self.clock: Clock = self.hand
        self.rng = random.Random(0)
        self.notes: list[tuple[str, Any]] = []

    def note(self, kind: str, /, **fields: Any) -> None:
        self.notes.append((kind, fields.get("instance")))


class Table(Instances):
    """On a clock that is set by hand."""

    def __init__(
        self,
        *instances: Instance,
        keeps: bool = False,
        transports: Collection[str] | None = None,
        errors_max: int = 1,
    ) -> None:
        self.env = HandEnv()
        super().__init__(
            EndpointName("a", "b", "c"),
            self.env,
            metrics=Metrics(self.env),
            grace_s=8.0,
            stale_grace_s=10.0 if keeps else None,
            transports=transports,
            errors_max=errors_max,
        )
        self.replace({each.key: each for each in instances})

    def record(self, instance: Instance) -> InstanceRecord:
        found = self.get(instance.id)
        assert found is not None
        return found

    @property
    def instances(self) -> list[Instance]:
        return [each.instance for each in self]

    @property
    def notes(self) -> list[tuple[str, Any]]:
        """Those since it was asked last."""
        found, self.env.notes = self.env.notes, []
        return found

    def fault(self, *instances: Instance, lasts_s: float = 10) -> None:
        for each in instances:
            self.fail(self.record(each), DisconnectedError("gone"), self.env.hand.at, lasts_s)

    def candidates(self, now: float, exclude: Collection[str] = ()) -> list[Instance]:
        """Whom a request may be sent to."""
        group, without = self.choices.asked(now, exclude)
        left = [each for each in group.numbers if each not in without]
        return [self.choices.records[each].instance for each in left]

    def load(self, instance_id: str) -> int:
        record = self.get(instance_id)
        return 0 if record is None else record.load

    def status(self, instance: Instance, now: float = 0) -> InstanceStatus:
        return self.record(instance).status(now)


def instance(number: int, *, draining: bool = False, incarnation: int = 1) -> Instance:
    return Instance(
        endpoint="a/b/c",
        id=f"{number:x}",
        transports={"tcp": f"h:{number}"},
        draining=draining,
        incarnation=incarnation,
    )
