"""TCP: the request plane, and the response plane in which workers call home.

Read `tcp/streams/server.py` (caller) beside `tcp/streams/client.py` (worker), then
`tcp/requests/plane.py` (caller) beside `tcp/requests/server.py` (worker). `tcp/streams/carrier.py`
says what a stream and what it travels on are to each other, `tcp/streams/channel.py` how items
reach the consumer (`sending.py`: what sending costs). KV blocks move by `tcp/transfer/plane.py`. Works unchanged on simulated sockets.
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
