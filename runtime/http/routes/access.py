"""The lines of the access log about requests that ask for no answer of a model.

Inference writes its own (`chat.py`), which know more.
"""

from __future__ import annotations

from collections.abc import Container, MutableMapping
from typing import Any, Final

from starlette.types import ASGIApp, Receive, Scope, Send

from ...logs.access import LOOK_AGENT, AccessLog
from ...metrics.metrics import SUCCESS

OUTCOME: Final = "trinamo.outcome"
"""Where an application leaves the code of an error in the scope."""
PROBES: Final = frozenset({"/health", "/live", "/metrics", "/status", "/sd"})
"""What monitors ask again and again."""
_LOOK: Final = (b"user-agent", LOOK_AGENT.encode())


class TellsRequests:
    """Tells `access` of every request to `app` but those of `handlers`, by method and path."""

    def __init__(
        self, app: ASGIApp, access: AccessLog, handlers: Container[tuple[bytes, bytes]]
    ) -> None:
        self._app, self._access, self._handlers = app, access, handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method, path = str(scope["method"]), str(scope["path"])
        if (method.encode("latin-1"), path.encode()) in self._handlers:
            await self._app(scope, receive, send)
            return
        began_at, status = self._access.now(), 0

        async def sending(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            is_success = 0 < status < 400
            self._access.tell(
                method,
                path,
                status or 499,
                SUCCESS if is_success else scope.get(OUTCOME, "cancelled"),
                began_at=began_at,
                is_success=is_success,
                is_probe=path in PROBES or _LOOK in scope["headers"],
            )
