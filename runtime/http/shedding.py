"""Refusing requests while all workers that could take them are busy, before they cost anything."""

from __future__ import annotations

from collections.abc import Iterable

from ..config.http import HttpConfig
from ..errors import OverloadedError
from ..events.busy import BusyLimits
from .models.models import Engine, RemoteEngine

__all__ = ["Shedding"]


class Shedding:
    """The busy thresholds of one service: `http.busy_blocks` and `http.busy_waiting_tokens`."""

    def __init__(self, config: HttpConfig) -> None:
        self._limits = BusyLimits(config.busy_blocks, config.busy_waiting_tokens)
        self._is_on = config.sheds_load

    def check(self, engines: Iterable[Engine]) -> None:
        """Raise `OverloadedError` if every worker of all `engines` has said that it is busy.

        Nobody is busy of whom no report has come lately, and no engine that is in this process.
        """
        if not self._is_on:
            return
        asked = list(engines)
        if asked and all(
            isinstance(each, RemoteEngine) and each.is_busy(self._limits) for each in asked
        ):
            raise OverloadedError("every worker that could answer is busy", bound="busy")
