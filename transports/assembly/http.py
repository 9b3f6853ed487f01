"""What speaks HTTP: our own listener and client, in the simulator as in life."""

from __future__ import annotations

import random
from contextlib import AbstractAsyncContextManager

from trinamo.runtime.config.http import HttpConfig
from trinamo.runtime.config.upstream import UpstreamConfig
from trinamo.runtime.http.transport import NO_HANDLERS, AsgiApp, Handlers, HttpServer
from trinamo.runtime.metrics.metrics import Metrics
from trinamo.runtime.planes.upstreams import Upstream
from trinamo.transports.openai.client import fetch


class Http:
    """See `HttpTransport`. What is not used is not imported: most processes ask no upstream."""

    fetch = staticmethod(fetch)

    def make_server(
        self,
        app: AsgiApp,
        config: HttpConfig,
        *,
        metrics: Metrics,
        rng: random.Random,
        handlers: Handlers = NO_HANDLERS,
    ) -> HttpServer:
        from trinamo.transports.http.server import Server

        return Server(app, config, metrics=metrics, rng=rng, handlers=handlers)

    def check_files(self, config: HttpConfig) -> None:
        from trinamo.transports.http.certificates import Certificates

        if config.tls.certificate_file is not None:
            Certificates(config.tls)

    def open_upstream(
        self, url: str, section: UpstreamConfig
    ) -> AbstractAsyncContextManager[Upstream]:
        from trinamo.transports.openai.upstream import open_upstream

        return open_upstream(url, section)
