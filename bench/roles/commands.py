"""What every role of a benchmark shares: the load, the codec, and commands, one JSON line each."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec

TOKEN = " token"
"""What every item is: six characters, seven bytes of msgpack."""
STEP_S = float(os.environ.get("BENCH_STEP_S", "0.005"))
"""How long one engine step lasts in paced runs: every stream gets one item per step."""
PHASE_S = 0.00125
"""How long from one item to the next in phased runs, where it is another stream's."""
IDLE_STEP_S = 0.05
"""How often an engine looks that nobody waits for: so rarely that it costs the others nothing."""

encode = msgspec.msgpack.Encoder().encode
decode_text = msgspec.msgpack.Decoder(str).decode
decode_any = msgspec.msgpack.Decoder().decode

Command = dict[str, object]
Commands = Mapping[str, Callable[..., Awaitable[Command]]]


def say(answer: Command) -> None:
    print(json.dumps(answer), flush=True)


async def answer_commands(
    read_line: Callable[[], Awaitable[str]], commands: Commands, ready: Command
) -> None:
    """Say `ready`, then run one command per line until standard input ends."""
    say(ready)
    while line := await read_line():
        command = json.loads(line)
        run = commands[command.pop("do")]
        say(await run(**command))


async def cpu() -> Command:
    """The CPU seconds this process has used, in user mode and in the kernel."""
    return {"cpu_s": time.process_time()}


async def measured(work: Callable[[], Awaitable[None]]) -> Command:
    """Run `work` and say how long it took by both clocks."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    await work()
    return {"wall_s": time.perf_counter() - wall_s, "cpu_s": time.process_time() - cpu_s}
