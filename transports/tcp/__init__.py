"""TCP: the request plane, and the streams that answer it, on one link of two processes.

Read `tcp/requests/plane.py` (caller) beside `tcp/requests/server.py` (worker), then
`tcp/streams/server.py` (caller) beside `tcp/streams/linked.py` (worker). `tcp/streams/link.py` is the
link itself, and one stream's place on it; over NATS, workers call home (`tcp/streams/client.py`).
`tcp/streams/registrations.py` are the caller's ends of streams, and `tcp/streams/channel.py` says how items
reach the consumer. KV blocks move by `tcp/transfer/plane.py`. Works unchanged on simulated sockets.
"""

from .requests.plane import TcpRequestPlane, open_request_plane
from .requests.server import TcpRequestServer, open_request_server
from .sockets import TcpOptions
from .streams.client import TcpClient, open_client
from .streams.server import TcpStreamServer, open_stream_server
from .transfer.plane import TcpMover, TransferOptions, open_transfer_plane

__all__ = [
    "TcpClient",
    "TcpMover",
    "TcpOptions",
    "TcpRequestPlane",
    "TcpRequestServer",
    "TcpStreamServer",
    "TransferOptions",
    "open_client",
    "open_request_plane",
    "open_request_server",
    "open_stream_server",
    "open_transfer_plane",
]
