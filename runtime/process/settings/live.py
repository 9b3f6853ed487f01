"""The configuration in force: a process's own, with what the cluster's settings say in its place.

A setting that is called after a configuration key replaces that key in every process while it is set.
Whatever it changes is changed in one step of the loop: requests under way go on as they began.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import msgspec

from ...config.config import Config
from .settings import LIVE_KEYS, SETTINGS, Settings


class LiveConfig:
    """Tells those who listen, synchronously, whenever it changes."""

    def __init__(self, config: Config, settings: Settings) -> None:
        self._own, self._settings = config, settings
        self._listeners: list[Callable[[Config], None]] = []
        self.config = config
        """What is in force now."""
        settings.listen(self._update)

    def listen(self, listener: Callable[[Config], None]) -> None:
        """Call `listener` with what is in force after each change, and now if it differs already."""
        self._listeners.append(listener)
        if self.config is not self._own:
            listener(self.config)

    def values(self) -> dict[str, Any]:
        """What is in force of each setting, by its name."""
        stored = {each.name: self._settings.get(each) for each in SETTINGS.values()}
        return {
            name: reduce(getattr, name.split("."), self.config)
            if stored[name] == each.default
            else stored[name]
            for name, each in SETTINGS.items()
        }

    def _update(self) -> None:
        found = self._in_force()
        if found == self.config:
            return
        self.config = found
        for listener in self._listeners:
            listener(found)

    def _in_force(self) -> Config:
        found = self._own
        for setting in LIVE_KEYS:
            value = self._settings.get(setting)
            if value is not None:
                found = _replaced(found, setting.name.split("."), value)
        return found


def _replaced(section: Any, way: list[str], value: Any) -> Any:
    """The section with `value` at the end of the `way`."""
    name, *more = way
    inner = _replaced(getattr(section, name), more, value) if more else value
    return msgspec.structs.replace(section, **{name: inner})
