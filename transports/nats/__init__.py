"""NATS: the event plane, and a request plane over any event plane.

`open_nats` holds a connection; `NatsRequestServer` and `NatsRequestPlane` carry requests. Read
`plane.py` first, then `island.py` for how nats-py lives beside trio, then `requests.py`.
"""

from .outbox import WITHOUT_JETSTREAM
from .plane import NatsEventPlane, NatsSubscription, open_nats
from .requests import NatsRequestPlane, NatsRequestServer

__all__ = [
    "WITHOUT_JETSTREAM",
    "NatsEventPlane",
    "NatsRequestPlane",
    "NatsRequestServer",
    "NatsSubscription",
    "open_nats",
]
