"""Refusing requests while all workers that could take them are busy, before they cost anything."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import OverloadedError
from .admission import Admission
from .models.models import Engine, RemoteEngine

__all__ = ["Shedding"]


class Shedding:
    """Refuses by the busy thresholds of one service, `admission.busy`."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def check(self, engines: Iterable[Engine]) -> None:
        """Raise `OverloadedError` if every worker of all `engines` has said that it is busy.

        Nobody is busy of whom no report has come lately, and no engine that is in this process.
        """
        limits = self._admission.busy
        if limits is None:
            return
        asked = list(engines)
        if asked and all(isinstance(each, RemoteEngine) and each.is_busy(limits) for each in asked):
            raise OverloadedError("every worker that could answer is busy", bound="busy")
