"""`HttpService` for programs, with the seeds' builder.

service = HttpService.builder().port(8787).host("127.0.0.1").build()
service.model_manager().add_chat_completions_model("echo", engine)
port = await service.spawn(nursery)
"""

from __future__ import annotations

from typing import Any, Self

import msgspec

from trinamo.runtime.config.http import HttpConfig
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import ConfigError
from trinamo.runtime.http import service
from trinamo.runtime.http.metrics import FrontendMetrics

from .http import Http


class HttpService(service.HttpService):
    """The HTTP service of one frontend. It runs once; make it with `builder()`."""

    @staticmethod
    def builder() -> HttpServiceBuilder:
        """Start configuring a service."""
        return HttpServiceBuilder()


class HttpServiceBuilder:
    """Each method sets one thing and returns the builder; `build()` makes the service.

    The host is loopback unless set: a service without authentication must not face a network by
    default.
    """

    def __init__(self) -> None:
        self._config = HttpConfig()

    def port(self, port: int) -> Self:
        """The port to listen on; 0 takes any free one."""
        return self.config(port=port)

    def host(self, host: str) -> Self:
        """The address or name to listen on, IPv4 or IPv6; `0.0.0.0` or `::` for all."""
        return self.config(host=host)

    def enable_chat_endpoints(self, enabled: bool = True) -> Self:  # noqa: FBT001, FBT002 -- the seeds' builder
        """Whether there is `/v1/chat/completions`."""
        return self.config(enable_chat_endpoints=enabled)

    def enable_cmpl_endpoints(self, enabled: bool = True) -> Self:  # noqa: FBT001, FBT002 -- the seeds' builder
        """Whether there is `/v1/completions`."""
        return self.config(enable_cmpl_endpoints=enabled)

    def config(self, section: HttpConfig | None = None, **changes: Any) -> Self:
        """Take a whole section `http` of a configuration, or set any of its keys by name.

        Raises `ConfigError`, which names the key, for an unknown one or a bad value.
        """
        keys = msgspec.structs.asdict(section or self._config) | changes
        try:
            self._config = msgspec.convert(keys, HttpConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(f"a wrong HTTP setting: {error}") from error
        return self

    def build(self) -> HttpService:
        """The service."""
        env = RealEnv()
        return HttpService(self._config, env, FrontendMetrics(env), Http())
