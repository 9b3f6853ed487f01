"""One simulator of others plays the programs, in an environment that has it: `python peer.py simloom SEEDS`.

Prints one JSON object: by program, what each seed has seen, or what was raised.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import programs


def simloom(program: Callable[[], Coroutine[Any, Any, int]], seed: int) -> int:
    import simloom

    async def main(world: Any) -> int:
        seen: list[int] = []

        async def on_host() -> None:
            seen.append(await program())

        world.host(HOST).spawn(on_host)
        await world.until(lambda: bool(seen), timeout=100_000)
        return seen[0]

    return int(simloom.run(main, seed=seed, scheduler=POLICY).value)


def detangle(program: Callable[[], Coroutine[Any, Any, int]], seed: int) -> int:
    import detangle

    return int(detangle.run(program, strategy=POLICY or "random", seed=seed))


HOST = "127.0.0.1" if sys.argv[1] == "detangle" else "one"
NAME, SEEDS, POLICY = sys.argv[1], int(sys.argv[2]), (sys.argv[3:] or [""])[0] or None
PROGRAMS: dict[str, tuple[Callable[[], Coroutine[Any, Any, int]], int]] = {
    "lost_update": (programs.lost_update, SEEDS),
    "careful_update": (programs.careful_update, SEEDS),
    "pieces": (lambda: programs.pieces(HOST), SEEDS // 10),
    "never_read": (lambda: programs.never_read(HOST), 1),
}
play = {"simloom": simloom, "detangle": detangle}[NAME]
seen: dict[str, Any] = {}
for name, (program, seeds) in PROGRAMS.items():
    begun = time.process_time()
    found: list[int | str] = []
    for seed in range(seeds):
        try:
            found.append(play(program, seed))
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is told
            found.append(f"{type(error).__name__}: {error}"[:100])
    seen[name] = {"seen": found, "cpu_s": time.process_time() - begun}
json.dump(seen, sys.stdout)
