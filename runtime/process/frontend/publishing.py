"""A frontend with a status port says in the control plane where that is, for `/sd` and who looks."""

from __future__ import annotations

import trio

from ...config.config import REVOKE_TIMEOUT_S
from ...env import draw_id
from ...nurseries import open_nursery
from ...protocol.discovery.instances import FrontendEntry, encode_frontend, frontend_key
from ..runtime import Runtime


async def publish_frontend(runtime: Runtime, url: str, status: str) -> None:
    """Keep the entry while this runs: others ask for its status at `status`.

    It is gone at once when this is cancelled, if the store answers.

    A store that is away, or does not let us write, is tried again: nobody waits for the entry.
    """
    frontend_id = draw_id(runtime.env.rng)
    url = runtime.data.advertised_url(url) or url
    entry = encode_frontend(FrontendEntry(id=frontend_id, url=url, status=status))
    try:
        async with open_nursery() as nursery:
            nursery.start_soon(runtime.registrar.run)
            await runtime.registrar.register(frontend_key(frontend_id), lambda _: entry)
            await trio.sleep_forever()
    finally:
        with trio.move_on_after(REVOKE_TIMEOUT_S, shield=True):
            await runtime.registrar.revoke()
