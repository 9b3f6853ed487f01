"""What things are and how they behave: the ground floor.

Reading order, which is also the way of one request:

1. `http/`            the edge: routes, server-sent events, status codes, models
2. `router.py`        which instance: the live set, load, faults
3. `client.py`        the caller's end: request out, response stream in
4. `worker.py`        the worker's end: admit, run the handler, stream back
5. `engines/`         what an engine is; echo, exact, mocker, llamacpp; the step loop they share

Beside them: `context.py` (one request's cancellation), `registration.py` (being found),
`queues.py` and `consumer.py` (work queues), `lifespan.py` (the nurseries that own it all),
`composition.py` (what they are made of), `shutdown.py` (how they end), `planes/` (what a transport
must offer), `protocol/` (bytes, events, tables, sans-IO), `kv/` (block memory, and how it moves),
`env.py` (the seam the simulator replaces), `config.py`, `errors.py`, `metrics.py`, `logs/`.

The names below are the public ones. They are imported when first used, so that a program which
wants only the errors does not pay for the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .client import Client, ResponseStream
    from .config import Config, load_config
    from .consumer import Consumer, open_consumer
    from .context import Context, Reason, State
    from .env import Env, RealEnv
    from .errors import TrinamoError
    from .lifespan import DataPlane, Runtime, Transports, open_runtime
    from .protocol.instances import EndpointName, Instance
    from .router import Router
    from .worker import Worker

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
    "Client": "client",
    "Config": "config",
    "Consumer": "consumer",
    "Context": "context",
    "DataPlane": "lifespan",
    "EndpointName": "protocol.instances",
    "Env": "env",
    "Instance": "protocol.instances",
    "RealEnv": "env",
    "Reason": "context",
    "ResponseStream": "client",
    "Router": "router",
    "Runtime": "lifespan",
    "State": "context",
    "Transports": "lifespan",
    "TrinamoError": "errors",
    "Worker": "worker",
    "load_config": "config",
    "open_consumer": "consumer",
    "open_runtime": "lifespan",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
