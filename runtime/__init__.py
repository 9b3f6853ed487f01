"""What things are and how they behave: the ground floor.

One room a concern; the first four are also the way of one request:

1. `http/`            the edge: routes, server-sent events, status codes, models
2. `caller/`          which instance: the live set, load, faults; request out, response stream in
3. `worker/`          the worker's end: being found, admit, run the handler, stream back
4. `engines/`         what an engine is; echo, exact, mocker, llamacpp; the step loop they share

`process/` holds the nurseries that own it all, and the order in which they end. `kv/` is block
memory and how it moves, `queues/` work queues, `events/` what must not be missed, `planes/` what a
transport must offer, `protocol/` bytes, events and tables, sans-IO; `config/`, `metrics/`, `logs/`
are what they say. What everything imports is here: `errors.py`, `context.py` (one request's
cancellation), `env.py` (the seam the simulator replaces), `nurseries.py`, `retries.py`.

The names below are the public ones. They are imported when first used, so that a program which
wants only the errors does not pay for the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .caller.client import Client, ResponseStream
    from .caller.router import Router
    from .config.config import Config, load_config
    from .context import Context, Reason, State
    from .env import Env, RealEnv
    from .errors import TrinamoError
    from .process.runtime import DataPlane, Runtime, Transports, open_runtime
    from .protocol.discovery.instances import EndpointName, Instance
    from .queues.consumer import Consumer, open_consumer
    from .worker.worker import Worker

__all__ = [
    "Client",
    "Config",
    "Consumer",
    "Context",
    "DataPlane",
    "EndpointName",
    "Env",
    "Instance",
    "RealEnv",
    "Reason",
    "ResponseStream",
    "Router",
    "Runtime",
    "State",
    "Transports",
    "TrinamoError",
    "Worker",
    "load_config",
    "open_consumer",
    "open_runtime",
]

_HOMES: Final = {
    "Client": "caller.client",
    "Config": "config.config",
    "Consumer": "queues.consumer",
    "Context": "context",
    "DataPlane": "process.runtime",
    "EndpointName": "protocol.discovery.instances",
    "Env": "env",
    "Instance": "protocol.discovery.instances",
    "RealEnv": "env",
    "Reason": "context",
    "ResponseStream": "caller.client",
    "Router": "caller.router",
    "Runtime": "process.runtime",
    "State": "context",
    "Transports": "process.runtime",
    "TrinamoError": "errors",
    "Worker": "worker.worker",
    "load_config": "config.config",
    "open_consumer": "queues.consumer",
    "open_runtime": "process.runtime",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
