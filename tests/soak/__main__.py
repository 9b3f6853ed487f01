"""`make search WHAT=soak`: a real cluster under load and faults, each answer compared with the undisturbed one.

Two frontends, etcd, NATS, and workers that do all or share prefill and decode in turns, on loopback and
with a secret, as `trinamo up` starts them. Clients chat, complete, stream, call tools and leave early,
while processes are killed, terminated, stopped and continued. The first frontend is left alone. The seed
decides which faults come when and what each client asks. The end of each turn says what the processes
still hold, the end of the run what became of every request; the logs stay in a folder. Exit code 0:
nothing of what must not happen did.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Final

import trio

from tests.soak.ledger import SHOWN
from tests.soak.plan import QUESTIONS, policy_of, turns_of
from tests.soak.soak import open_soak

EXAMPLES: Final = """examples:
  make search WHAT=soak MINUTES=15
  make search WHAT=soak MINUTES=15 SEED=7
  make search WHAT=soak ARGS="--hours 2 --turns 1"        old enough for slopes: one cluster all the time
  make search WHAT=soak MINUTES=15 SEED=7 ARGS="--turn 2" the second turn alone, with the same faults
  make search WHAT=soak MINUTES=1 ARGS="--turns 1 --set data_plane.requests=nats"
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="make search WHAT=soak", description=__doc__, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("--minutes", type=float, default=10.0, help="of faults, in all turns (10)")
    made.add_argument("--hours", type=float, help="of faults, in place of minutes")
    made.add_argument(
        "--seed", type=int, default=time.time_ns() % 10**6, help="of faults and load (by the clock)"
    )
    made.add_argument("--turns", type=int, default=2, help="into which the time is divided (2)")
    made.add_argument("--turn", type=int, default=0, metavar="N", help="only the Nth of them")
    made.add_argument("--clients", type=int, default=10, help="that ask at once (10)")
    made.add_argument(
        "--questions", type=int, default=QUESTIONS, help=f"that they ask ({QUESTIONS}, the most)"
    )
    made.add_argument("--out", type=Path, default=Path("soaked"), help="folder for logs (soaked)")
    made.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of every process"
    )
    return made


async def run(options: argparse.Namespace, out: Path) -> bool:
    """Play the turns; whether something happened that must not."""
    settings = dict(each.split("=", 1) for each in options.set)
    length_s = 60 * options.minutes / options.turns
    turns = turns_of(
        options.seed,
        length_s=length_s,
        count=options.turns,
        questions_max=options.questions,
    )
    settings.setdefault("router.policy", policy_of(options.seed))
    async with open_soak(options.seed, clients=options.clients, out=out, settings=settings) as soak:
        for turn in turns:
            if options.turn in (0, turn.number):
                await soak.play(turn)
    soak.end()
    if not soak.ledger.is_red:
        return False
    for each in (*soak.ledger.red[:SHOWN], *soak.ledger.findings):
        print(f"  {each}")
    return True


def main() -> int:
    """Soak, and say what became of everything; 1 if it is red."""
    options = parser().parse_args()
    if options.hours is not None:
        options.minutes = 60 * options.hours
    out = (options.out / f"{options.seed}-{os.getpid()}").resolve()
    out.mkdir(parents=True)
    print(
        f"seed {options.seed}, {options.minutes:g} minutes in {options.turns} turns, logs in {out}"
    )
    try:
        is_red = trio.run(partial(run, options, out))
    except KeyboardInterrupt:
        print("interrupted; every process has ended")
        return 130
    again = f"make search WHAT=soak MINUTES={options.minutes:g} SEED={options.seed}"
    print(f"{'RED' if is_red else 'green'}: {again}, logs in {out}")
    if is_red:
        print(f'one turn of it again: {again} ARGS="--turns {options.turns} --turn N"')
    return int(is_red)


if __name__ == "__main__":
    sys.exit(main())
