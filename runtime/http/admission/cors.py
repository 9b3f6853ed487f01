"""Pages of other origins that may ask (CORS); without a list nobody's may.

A browser asks first (a preflight) whether a page may send JSON and a key, and shows the page an
answer only if its head allows the page's origin. No cookie is ever taken, so a page sends nothing
that it does not know itself. https://fetch.spec.whatwg.org/#http-cors-protocol
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ...config.http import HttpConfig
from ..exchanges import Headers, find_header

ANY: Final = "*"
PREFIX: Final = "/v1/"
"""What pages may ask for: OpenAI's API, and nothing that operators ask."""
_TOLD: Final = (
    *("x-request-id", "x-trinamo-worker", "x-trinamo-cached-blocks", "x-trinamo-unknown-fields"),
    *("retry-after", "retry-after-ms", "x-should-retry"),
    *("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"),
)
"""Headers of answers that a page may read."""


class Cors:
    """Which origins may ask one service, and what its answers say of it."""

    def __init__(self, section: HttpConfig) -> None:
        self.origins: Sequence[str] = section.cors_origins
        ids = map(str.lower, section.request_id_headers)
        self.told = tuple(dict.fromkeys((*_TOLD, *ids)))
        self._told = (b"access-control-expose-headers", ", ".join(self.told).encode())
        self._allowed = {each.encode() for each in self.origins}

    def headers(self, given: Headers) -> Headers:
        origin = find_header(given, b"origin")
        if ANY in self.origins:
            return [] if origin is None else [(b"access-control-allow-origin", b"*"), self._told]
        vary = (b"vary", b"origin")
        if origin not in self._allowed or origin is None:
            return [vary]
        return [(b"access-control-allow-origin", origin), self._told, vary]


class AllowsOrigins(CORSMiddleware):
    """Answers preflights, and says of `app`'s answers who may read them."""

    def __init__(self, app: ASGIApp, cors: Cors) -> None:
        super().__init__(
            app,
            allow_origins=cors.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=cors.told,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if str(scope.get("path", "")).startswith(PREFIX):
            await super().__call__(scope, receive, send)
        else:
            await self.app(scope, receive, send)
