"""The edge: OpenAI's API over HTTP, on hypercorn's trio server.

Reading order, the way a request goes: `server.py` and `connection.py` (sockets), `app.py`
(routes), `chat.py` (both inference endpoints), `streaming.py` (an answer to ASGI), `status.py`
(errors to HTTP), `models.py` (who serves which model), `service.py` (it all, with a builder),
`status_app.py` (the workers' status port).
"""

from .models import DeploymentState, Engine, ModelEngines, ModelManager
from .service import HttpService, HttpServiceBuilder

__all__ = [
    "DeploymentState",
    "Engine",
    "HttpService",
    "HttpServiceBuilder",
    "ModelEngines",
    "ModelManager",
]
