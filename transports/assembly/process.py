"""A process on real transports: what a program that uses trinamo as a library opens.

`trinamo.runtime.process` does the work, on whatever planes it is given; here it is given real ones.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from trinamo.runtime.config.config import Config, load_config
from trinamo.runtime.env import Env, RealEnv
from trinamo.runtime.kv.regions import KvCache
from trinamo.runtime.metrics.metrics import Metrics
from trinamo.runtime.process import opening
from trinamo.runtime.process.runtime import Runtime
from trinamo.runtime.process.stopping import StopRequest, stopped_by_signals
from trinamo.runtime.process.transports import Transports
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.worker.endpoint import InputHandler, StreamHandler, UnaryHandler

from .planes import RealTransports


def open_runtime(
    config: Config | None = None,
    *,
    serving: bool = False,
    kv: KvCache | None = None,
    metrics: Metrics | None = None,
    env: Env | None = None,
    transports: Transports | None = None,
) -> AbstractAsyncContextManager[Runtime]:
    """Open every plane and yield the runtime; leaving it is the orderly shutdown.

    Cancelling it instead ends everything at once; its instance is found until its lease ends.

    Args:
        config: What `load_config` returned; None: the defaults and the environment.
        serving: Whether it takes requests: it gets an instance id, listeners and a lease.
        kv: Memory of its engine that peers may move blocks to and from; needs `serving`. Buffers
            and tensors that are there already become it by `kv_cache`.
        metrics: Where it counts; a `WorkerMetrics` if it serves.
        env: Clock and chance; the simulator has its own.
        transports: Makes the planes; as configured unless given.

    Raises:
        ConfigError: With the key that is wrong, or the address that cannot be bound.
        ConnectError: etcd or NATS does not answer; the sentence says what to do.
    """
    return opening.open_runtime(
        config or load_config(),
        env or RealEnv(),
        transports or RealTransports(),
        serving=serving,
        metrics=metrics,
        kv=kv,
    )


async def serve_stream(
    endpoint: EndpointName,
    handler: StreamHandler,
    *,
    config: Config | None = None,
    request_type: Any = Any,
    metadata: Mapping[str, str] | None = None,
    stop: StopRequest | None = None,
) -> None:
    """Serve one streaming endpoint until it is asked to stop, then leave in order.

    SIGINT and SIGTERM ask, unless `stop` is given; a second one, and cancellation, end it at once.
    For several endpoints see `open_runtime` and `Runtime.serve`, which has more arguments.
    """
    said: Any = {"request_type": request_type, "metadata": metadata}
    await _serve_until_stopped(lambda it: it.serve(endpoint, handler, **said), config, stop)


async def serve_unary(
    endpoint: EndpointName,
    handler: UnaryHandler,
    *,
    config: Config | None = None,
    request_type: Any = Any,
    metadata: Mapping[str, str] | None = None,
    stop: StopRequest | None = None,
) -> None:
    """Serve what `Client.call` asks, one answer for each request; all else as `serve_stream`."""
    said: Any = {"request_type": request_type, "metadata": metadata}
    await _serve_until_stopped(lambda it: it.serve_unary(endpoint, handler, **said), config, stop)


async def serve_bidirectional(
    endpoint: EndpointName,
    handler: InputHandler,
    *,
    config: Config | None = None,
    request_type: Any = Any,
    input_type: Any = Any,
    metadata: Mapping[str, str] | None = None,
    stop: StopRequest | None = None,
) -> None:
    """Serve what `Client.exchange` asks, input and answer streamed; all else as `serve_stream`."""
    said: Any = {"request_type": request_type, "input_type": input_type, "metadata": metadata}
    await _serve_until_stopped(
        lambda it: it.serve_bidirectional(endpoint, handler, **said), config, stop
    )


async def _serve_until_stopped(
    begin: Callable[[Runtime], Awaitable[object]], config: Config | None, stop: StopRequest | None
) -> None:
    async with asked_to_stop(stop) as asked, open_runtime(config, serving=True) as runtime:
        with asked.starting():
            await begin(runtime)
        await asked.wait()


@asynccontextmanager
async def asked_to_stop(stop: StopRequest | None) -> AsyncIterator[StopRequest]:
    """What asks the process to end: `stop`, or without one SIGINT and SIGTERM."""
    if stop is None:
        async with stopped_by_signals() as signalled:
            yield signalled
    else:
        with stop.everything:
            yield stop
