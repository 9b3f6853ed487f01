"""A frontend with a status port says in the control plane where that is, for `/sd` and who looks."""

from __future__ import annotations

from typing import Final

import trio

from ...env import draw_id
from ...nurseries import open_nursery
from ...protocol.discovery.frontends import FrontendEntry, encode_frontend, frontend_key
from ..runtime import Runtime

_EVERYWHERE: Final = ("//0.0.0.0:", "//[::]:")


def _advertised(url: str, host: str | None) -> str:
    """The URL that others ask: one that is bound to every address is asked at `host`."""
    for everywhere in _EVERYWHERE if host is not None else ():
        url = url.replace(everywhere, f"//[{host}]:" if ":" in str(host) else f"//{host}:")
    return url


async def publish_frontend(runtime: Runtime, url: str, status_url: str) -> None:
    """Keep the entry while this runs; gone at once when it is cancelled, if the store answers.

    A store that is away, or does not let us write, is tried again: nobody waits for the entry.
    """
    frontend_id = draw_id(runtime.env.rng)
    status = _advertised(status_url, runtime.config.data_plane.tcp.advertise_host)
    entry = encode_frontend(FrontendEntry(id=frontend_id, url=url, status=status))
    try:
        async with open_nursery() as nursery:
            nursery.start_soon(runtime.registrar.run)
            await runtime.registrar.register(frontend_key(frontend_id), lambda _: entry)
            await trio.sleep_forever()
    finally:
        with trio.move_on_after(runtime.config.shutdown.revoke_timeout_s, shield=True):
            await runtime.registrar.revoke()
