"""What a transport must offer: one typing.Protocol per plane, and a `Mover` for transfers.

A *plane* is a kind of traffic, a *transport* a technology that carries it. The runtime knows only
these interfaces; `transports.assembly` puts concrete transports behind them. One conformance suite per
interface lives in `tests/conformance/` and runs on every implementation. What runs beside the requests and
a plane may refuse, such as a watch, is tried again by `retries.py`.

Cancellation: every method here may be cancelled at any checkpoint. A cancelled write has an
unknown outcome, exactly like one that raised `UnknownOutcomeError`.
"""

from ..protocol.queue.jobs import (
    NO_ORIGIN,
    DeadLetter,
    JobOrigin,
    LeasedJob,
    PutResult,
    QueueLimits,
    QueueStatistics,
    Settlement,
)
from .control import (
    ControlPlane,
    ControlStatistics,
    CountsControl,
    Delete,
    Entry,
    Lease,
    Put,
    PutOutcome,
    Resync,
    Snapshot,
    WatchEvent,
)
from .events import CountsEvents, EventPlane, EventStatistics, Message, Subscription, WorkQueue
from .regions import DeviceMemory, MemoryRegion, Registrable, RemoteMemory
from .requests import (
    CallHome,
    InputRegistration,
    PostedRequest,
    Registration,
    RequestPlane,
    RequestServer,
    RequestService,
    ResponseChannel,
    ResponsePlane,
    ResponseSender,
    TakeAnswer,
)
from .settlement import SettlementPlane
from .transfer import Mover, Transfer, TransferPlane, TransferReport
from .transports import DataPlane, TransferChain

__all__ = [
    "NO_ORIGIN",
    "CallHome",
    "ControlPlane",
    "ControlStatistics",
    "CountsControl",
    "CountsEvents",
    "DataPlane",
    "DeadLetter",
    "Delete",
    "DeviceMemory",
    "Entry",
    "EventPlane",
    "EventStatistics",
    "InputRegistration",
    "JobOrigin",
    "Lease",
    "LeasedJob",
    "MemoryRegion",
    "Message",
    "Mover",
    "PostedRequest",
    "Put",
    "PutOutcome",
    "PutResult",
    "QueueLimits",
    "QueueStatistics",
    "Registrable",
    "Registration",
    "RemoteMemory",
    "RequestPlane",
    "RequestServer",
    "RequestService",
    "ResponseChannel",
    "ResponsePlane",
    "ResponseSender",
    "Resync",
    "Settlement",
    "SettlementPlane",
    "Snapshot",
    "Subscription",
    "TakeAnswer",
    "Transfer",
    "TransferChain",
    "TransferPlane",
    "TransferReport",
    "WatchEvent",
    "WorkQueue",
]
