"""Lines about the instances of one endpoint, each with `instance_id` as a field."""

from __future__ import annotations

import logging

from ..protocol.discovery.instances import Instance


class InstanceLog:
    """The texts begin with the instance's id and the endpoint, `instance %s of %s …`."""

    def __init__(self, logger: logging.Logger, endpoint: object) -> None:
        self._logger = logger
        self._endpoint = endpoint

    def info(self, text: str, instance: Instance, *more: object) -> None:
        """A line at `info`; `more` are the text's further arguments."""
        self._log(logging.INFO, text, instance, more)

    def warning(self, text: str, instance: Instance, *more: object) -> None:
        """A line at `warning`."""
        self._log(logging.WARNING, text, instance, more)

    def _log(self, level: int, text: str, instance: Instance, more: tuple[object, ...]) -> None:
        fields = {"instance_id": instance.id}
        self._logger.log(level, text, instance.id, self._endpoint, *more, extra=fields)
