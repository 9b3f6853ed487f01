"""What stands before the routes that are no inference: lines of the access log, and keys.

Inference looks at its keys and writes its lines itself (`chat.py`), which know more.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Final

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ...errors import RequestError
from ...logs.access import LOOK_AGENT, AccessLog
from ...metrics.metrics import SUCCESS
from ...view.overview import PREFIX
from ..admission.keys import ApiKeys
from ..status import answer_error

OUTCOME: Final = "trinamo.outcome"
"""Where an application leaves the code of an error in the scope."""
PROBES: Final = frozenset({"/health", "/live", "/metrics", "/status", "/sd"})
"""What monitors ask again and again."""
_LOOK: Final = (b"user-agent", LOOK_AGENT.encode())
OPEN: Final = frozenset({"/health", "/live"})
"""What load balancers and supervisors ask, who hold no secrets."""
_TENANTS: Final = ("/v1/", "/openapi.json")
"""What begins so tells a client nothing of others; all else is for operators."""


class TellsRequests:
    """Tells `access` of every request to `app`."""

    def __init__(self, app: ASGIApp, access: AccessLog) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method, path = str(scope["method"]), str(scope["path"])
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


class NeedsKey:
    """Lets only requests with a key to `app`.

    What tells of all clients needs one that is marked as an operator's.

    The dashboard is shown without one: a browser cannot be told to send one with a page, and where
    there are keys it is only served here if the configuration says so.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope.get("path", ""))
        is_open = path == PREFIX or path.startswith(f"{PREFIX}/") or path in OPEN
        if scope["type"] == "http" and not is_open:
            is_tenants = path.startswith(_TENANTS)
            check = self._keys.check if is_tenants else self._keys.check_operator
            try:
                check(scope["headers"])
            except RequestError as error:
                answer = answer_error(error)
                scope[OUTCOME] = answer.code
                told = Response(answer.to_body(), answer.status, media_type="application/json")
                told.raw_headers.extend(answer.headers)
                await told(scope, receive, send)
                return
        await self._app(scope, receive, send)
