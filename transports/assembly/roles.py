"""The roles of a cluster on real transports, for programs: apart, because HTTP comes with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trinamo.runtime.config.config import Config, load_config
from trinamo.runtime.engines import GenerationEngine
from trinamo.runtime.env import RealEnv
from trinamo.runtime.process import roles
from trinamo.runtime.process.stopping import StopRequest

from .planes import RealTransports
from .process import asked_to_stop


async def serve_worker(
    engine: GenerationEngine | Sequence[GenerationEngine],
    *,
    config: Config | None = None,
    ready: Callable[[roles.WorkerReady], object] = lambda _: None,
    stop: StopRequest | None = None,
) -> None:
    """Serve the model of `engine` to all frontends until it is asked to stop; then leave in order.

    As `trinamo worker` does: under the name of `worker.namespace`, `component` and `endpoint`, with
    a status port. Of several engines each has an endpoint of its own, called after its model. The engine stays open, and yours. `ready` is called once the model can be found.
    What asks to stop, and what is raised, is as for `serve_stream` and `open_runtime`.
    """
    async with asked_to_stop(stop) as asked:
        await roles.serve_worker(
            config or load_config(), RealEnv(), RealTransports(), engine, asked, ready=ready
        )


async def serve_frontend(
    *,
    config: Config | None = None,
    ready: Callable[[roles.FrontendReady], object] = lambda _: None,
    stop: StopRequest | None = None,
) -> None:
    """Serve the OpenAI HTTP API for all models that are found until it is asked to stop; then drain.

    As `trinamo frontend` does; `ready` is called with its URL once it answers. What asks to stop,
    and what is raised, is as for `serve_stream` and `open_runtime`.
    """
    async with asked_to_stop(stop) as asked:
        await roles.serve_frontend(
            config or load_config(), RealEnv(), RealTransports(), asked, ready=ready
        )
