"""The page itself: files beside this one, read once, served as they are.

A page may run our own scripts alone and talk to us alone (`POLICY`): what a model or a worker calls
itself can be no code, whatever a mistake in the page makes of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from ..status import PathNotFoundError

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    # A frontend of another version may answer tomorrow.
    "cache-control": "no-cache",
}
_FOLDER: Final = Path(__file__).with_name("files")
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def file_routes(prefix: str) -> list[Route]:
    """`prefix` for the page, `prefix/NAME` for what it loads; blocks on the disk, so call it early."""
    routes = [Route("/", partial(_to_page, prefix))]
    for path in sorted(_FOLDER.iterdir()):
        if path.suffix in _TYPES:
            is_page = path.name == "index.html"
            where = prefix if is_page else f"{prefix}/{path.name}"
            routes.append(Route(where, _answer(path.read_bytes(), _TYPES[path.suffix])))
    return routes


def _answer(data: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(_: Request) -> Response:
        return Response(data, media_type=media_type, headers=HEADERS)

    return answer


async def _to_page(prefix: str, request: Request) -> Response:
    """A browser that is given no path means the page; a program has mistaken the address."""
    if "text/html" not in request.headers.get("accept", ""):
        raise PathNotFoundError("there is nothing at /")
    return RedirectResponse(prefix)
