"""An engine whose KV blocks others may read: `python kv_owner.py kv key=value …`.

Prints one JSON line with its engine id, the blocks it granted, their ticket and their bytes' value,
and serves until it is killed or told to end.
"""

from __future__ import annotations

import json
import signal
import sys

import trio

from trinamo.runtime.engines.threads import limit_threads

limit_threads(1)

from trinamo.runtime.config.config import load_config  # noqa: E402
from trinamo.runtime.engines.exact.engine import open_exact_engine  # noqa: E402
from trinamo.runtime.env import RealEnv  # noqa: E402
from trinamo.runtime.kv.memory import KvMemory  # noqa: E402
from trinamo.runtime.logs.setup import setup_log  # noqa: E402
from trinamo.runtime.process.opening import open_runtime  # noqa: E402
from trinamo.transports.assembly.planes import RealTransports  # noqa: E402 -- threads first

VALUE = 4321


async def serve() -> None:
    config = load_config(environ={}, overrides=dict(text.split("=", 1) for text in sys.argv[2:]))
    setup_log(config.log)
    async with (
        open_exact_engine(block_count=128) as engine,
        open_runtime(config, RealEnv(), RealTransports(), serving=True, kv=engine.kv) as runtime,
    ):
        assert engine.kv is not None
        assert runtime.transfers is not None
        blocks = engine.kv.pool.take(3)
        assert blocks is not None
        assert isinstance(engine.kv.memory, KvMemory)
        engine.kv.memory.view[:, :, blocks] = VALUE
        async with runtime.transfers.grant(blocks, ttl_s=600) as grant:
            facts = {"engine_id": runtime.instance_id, "blocks": blocks, "ticket": grant.ticket}
            with trio.open_signal_receiver(signal.SIGTERM) as signals:
                print(json.dumps({**facts, "value": VALUE}), flush=True)
                async for _ in signals:
                    break


trio.run(serve)
