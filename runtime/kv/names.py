"""What the processes of one namespace name their KV blocks by, and nobody else can."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from ..env import Env
from ..errors import ControlPlaneError
from ..planes import ControlPlane
from ..protocol.kv.names import HASH_BYTES, BlockNames
from ..retries import Retries

KV_NAMES_PREFIX: Final = "kv_names/"
_log = logging.getLogger("trinamo.kv")


async def share_names(control: ControlPlane, env: Env, secret: bytes, namespace: str) -> BlockNames:
    """The names of `namespace`: by the cluster's secret, or else by a salt in the control plane.

    Whoever comes first draws the salt. A store that is away is waited for; where it refuses, the
    names are this process's own, which routers see and log.
    """
    shared = secret

    async def agree(_: Callable[[], None]) -> None:
        nonlocal shared
        key = KV_NAMES_PREFIX + namespace
        drawn = env.rng.getrandbits(8 * HASH_BYTES).to_bytes(HASH_BYTES, "big")
        try:
            while (entry := await control.get(key)) is None:
                await control.compare_and_put(key, drawn, mod_revision=0)
            shared = entry.value
        except ControlPlaneError:
            shared = drawn

    if not secret:
        await Retries(_log, f"the KV blocks of {namespace} have no names").run(agree)
    return BlockNames(shared + namespace.encode())
