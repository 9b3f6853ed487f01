"""Keys for what is no inference, which looks itself (`chat.py`)."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from ...errors import RequestError
from ...view.overview import PREFIX
from ..admission.keys import ApiKeys
from ..asgi import send_error
from ..status import answer_error
from .access import OUTCOME

OPEN: Final = frozenset({"/health", "/live"})
"""What load balancers and supervisors ask, who hold no secrets."""
_TENANTS: Final = ("/v1/", "/openapi.json")
"""What begins so tells a client nothing of others; all else is for operators."""


class NeedsKey:
    """Lets only requests with a key to `app`, and those of `handlers`, by method and path.

    What tells of all clients needs one that is marked as an operator's.

    The dashboard is shown without one: a browser cannot be told to send one with a page, and where
    there are keys it is only served here if the configuration says so.
    """

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, handlers: Container[tuple[bytes, bytes]]
    ) -> None:
        self._app, self._keys, self._handlers = app, keys, handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_open(scope):
            is_tenants = str(scope["path"]).startswith(_TENANTS)
            check = self._keys.check if is_tenants else self._keys.check_operator
            try:
                check(scope["headers"])
            except RequestError as error:
                answer = answer_error(error)
                scope[OUTCOME] = answer.code
                await send_error(send, answer)
                return
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path, method = str(scope["path"]), str(scope["method"])
        is_page = path == PREFIX or path.startswith(f"{PREFIX}/")
        is_handled = (method.encode("latin-1"), path.encode()) in self._handlers
        return is_page or is_handled or path in OPEN
