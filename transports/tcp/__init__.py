"""TCP: the request plane, and the response plane in which workers call home.

Read `stream_server.py` (caller) beside `stream_client.py` (worker), then `request_plane.py`
(caller) beside `request_server.py` (worker). `outbox.py` is how everything is written
(`sending.py`: what that costs), `channel.py` how items reach the consumer. KV blocks move by `transfer.py`. Works unchanged on
simulated sockets.
"""

from .request_plane import TcpRequestPlane, open_request_plane
from .request_server import TcpRequestServer, open_request_server
from .sockets import TcpOptions
from .stream_client import TcpClient
from .stream_server import TcpStreamServer, open_stream_server
from .transfer import TcpTransferPlane, TransferOptions, open_transfer_plane

__all__ = [
    "TcpClient",
    "TcpOptions",
    "TcpRequestPlane",
    "TcpRequestServer",
    "TcpStreamServer",
    "TcpTransferPlane",
    "TransferOptions",
    "open_request_plane",
    "open_request_server",
    "open_stream_server",
    "open_transfer_plane",
]
