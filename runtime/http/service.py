"""`HttpService`: the frontend's HTTP edge as one object.

What it does not do: sockets (`transport.py`), find models (a watch elsewhere tells the model
manager) and signals (the caller calls `stop()`). Programs make one with the builder of
`transports/assembly/http_service.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import trio
from starlette.routing import BaseRoute

from ..config.http import HttpConfig
from ..context import Reason
from ..env import Env
from ..errors import LocalProtocolError
from ..events.load import BusyLimits
from ..metrics.metrics import Metrics
from ..nurseries import open_nursery
from ..traces.ring import Traces
from ..view.overview import FrontendView, Overview, for_clients
from ..view.scraping import ScrapeTargets
from .admission.admission import Admission, RateLimit
from .admission.cors import Cors
from .admission.keys import ApiKeys
from .app import build_app, build_handlers, handled_routes
from .bodies import Bodies
from .comments import Comments
from .exchanges import Handler
from .metrics import FrontendMetrics
from .models.models import ModelManager
from .transport import HttpServer, HttpTransport

HAND_OVER_S = 0.5
"""What a client that has connected to a shared port has for its request."""
KILL_GRACE_S = 0.25
"""How long killed requests have to unwind before their connections are cut."""


def check_files(section: HttpConfig, env: Env, http: HttpTransport) -> None:
    """Read the files that a service will, of keys and certificates; `ConfigError` says what is wrong."""
    if section.needs_key:
        ApiKeys(section, env.rng, Metrics(env))
    http.check_files(section)


class HttpService:
    """The HTTP service of one frontend, served by `http`. It runs once.

    `look`, which must not wait, tells of the cluster; `targets` are what `/sd` lists; without them
    there is none of it.
    """

    def __init__(
        self,
        config: HttpConfig,
        env: Env,
        metrics: FrontendMetrics,
        http: HttpTransport,
        look: Callable[[], Overview] | None = None,
        traces: Traces | None = None,
        targets: ScrapeTargets | None = None,
    ) -> None:
        self.config = config
        self.metrics = metrics
        self.http = http
        self.admission = Admission(
            metrics,
            requests_max=config.requests_max,
            bodies=Bodies(config.bodies_bytes_max, config.bodies_max),
            answers_bytes_max=config.answers_bytes_max,
        )
        if config.cors_origins:
            self.admission.cors = Cors(config)
        if config.needs_key:
            self.admission.keys = ApiKeys(config, env.rng, metrics)
        self.tune(config)
        self.port: int | None = None
        """The bound port, once `run` has started."""
        self.server: HttpServer | None = None
        """What accepts connections, likewise."""
        self._manager = ModelManager(env, metrics)
        self._comments = Comments(config.comment_interval_s)
        self._look = look
        self.targets = targets
        self._stopping = trio.Event()
        self._has_run = False
        traces = traces or Traces(env.clock, 0)
        self.handlers = build_handlers(
            self._manager, self.admission, self._comments, config, traces
        )
        """What a server may call, by method and path, without `app` in between."""
        self.app = build_app(
            self._manager,
            self.admission,
            self.handlers,
            traces=traces,
            view=self.view,
            targets=targets,
        )

    def model_manager(self) -> ModelManager:
        """Where models are added and removed, before and while the service runs."""
        return self._manager

    @property
    def status(self) -> str:
        """`draining`, `ready`, `waiting` or `unavailable`, as `Admission.status` says."""
        return self.admission.status(has_instance=self._manager.has_instance)

    def view(self) -> FrontendView:
        """What it tells its clients of itself and of its cluster; does not wait."""
        return for_clients(self.full_view())

    def full_view(self) -> FrontendView:
        """All that it knows of itself and of its cluster; does not wait."""
        return FrontendView(
            status=self.status,
            in_flight=self.admission.in_flight,
            waiting=self.admission.queue.length,
            models=self._manager.views(),
            cluster=None if self._look is None else self._look(),
        )

    def add(
        self, handlers: Mapping[tuple[bytes, bytes], Handler], routes: Iterable[BaseRoute]
    ) -> None:
        """Answer these too; before it runs."""
        self.handlers.update(handlers)
        self.app.router.routes.extend([*handled_routes(handlers), *routes])

    def tune(self, section: HttpConfig) -> None:
        """Admit and refuse requests by the bounds of `section` from now on."""
        self.admission.requests_max = section.requests_max
        self.admission.busy = (
            BusyLimits(section.busy_blocks, section.busy_waiting_tokens)
            if section.sheds_load
            else None
        )
        queue = self.admission.queue
        queue.length_max, queue.timeout_s = section.queue_max, section.queue_timeout_s
        admission, rate_per_s = self.admission, section.rate_per_s
        if rate_per_s is None:
            admission.rate = None
        elif admission.rate is None:
            admission.rate = RateLimit(self.metrics.clock, rate_per_s, section.rate_burst)
        else:
            admission.rate.tune(rate_per_s, section.rate_burst)
        # Whom the new bounds let in need wait no longer.
        queue.settle()

    def stop(self) -> None:
        """Stop gracefully: `run` drains and returns. Synchronous and idempotent."""
        self.admission.is_leaving = True
        if not (self.config.lame_duck_s or self.config.reuse_port):
            self.admission.drain()
        self._stopping.set()

    async def run(self, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop()`; reports the bound port once connections are accepted.

        After `stop()` all is answered as before for `lame_duck_s`, but `/health` says 503 and each
        connection ends with its next answer, so that whoever keeps his comes to another frontend. A port
        that others share (`reuse_port`) is theirs then, and half a second more who had connected is answered.
        Then idle connections are closed, but for those over which a request has arrived, and new work is a 503
        while streams in flight go on, for `drain_timeout_s`; then they are stopped, after `stop_grace_s` killed, and within half a second more everything is closed, whatever
        the clients do. Cancelled, it closes at once. Raises `ConfigError` if it cannot listen.
        """
        if self._has_run:
            raise LocalProtocolError("an HttpService runs once; build another")
        self._has_run = True
        server = self.http.make_server(
            self.app,
            self.config,
            metrics=self.metrics,
            rng=self._manager.env.rng,
            handlers=self.handlers,
        )
        self.server = server
        async with open_nursery() as nursery:
            self.port = port = await nursery.start(server.serve)
            task_status.started(port)
            async with open_nursery() as answering:
                answering.start_soon(self._comments.run)
                async with open_nursery() as looking:
                    looking.start_soon(self.admission.queue.look)
                    if self.admission.keys is not None:
                        looking.start_soon(self.admission.keys.follow)
                    await self._stopping.wait()
                    server.retire()
                    await trio.sleep(self.config.lame_duck_s)
                    if self.config.reuse_port:
                        # Others answer there: a new connection is theirs, and who has one here may be about to ask.
                        server.hand_over()
                        await trio.sleep(HAND_OVER_S)
                    looking.cancel_scope.cancel()
                await server.close_idle()
                await self._drain()
                answering.cancel_scope.cancel()
            server.close()

    async def spawn(self, nursery: trio.Nursery) -> int:
        """`run` in `nursery`, until `stop()`; the bound port, once connections are accepted."""
        port: int = await nursery.start(self.run)
        return port

    async def _drain(self) -> None:
        admission = self.admission
        admission.drain()
        with trio.move_on_after(self.config.drain_timeout_s):
            await admission.wait_idle()
        if admission.in_flight:
            admission.stop(Reason.FRONTEND_SHUTDOWN)
            with trio.move_on_after(self.config.stop_grace_s):
                await admission.wait_idle()
        if admission.in_flight:
            admission.kill(Reason.FRONTEND_SHUTDOWN)
            with trio.move_on_after(KILL_GRACE_S):
                await admission.wait_idle()
