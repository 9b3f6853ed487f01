"""`make search WHAT=mutants`: how many small mistakes in the core the nearest tests notice.

A random sample of mutations (`mutations.py`) of the core (`core.py`) is played, each in a copy of
the tree, against the module's nearest tests. A mutant is killed when they fail or take ten times as
long; one that stays alive is printed with its line, and wants a test or is no mistake at all.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Final

import attrs

from tests.mutation.core import CORE, ROOT
from tests.mutation.mutations import Mutation, mutations

_SLOWEST: Final = 10
_MARGIN_S: Final = 30.0

_EXAMPLES: Final = """examples:
  make search WHAT=mutants ARGS="--count 60 --lanes 2"
  make search WHAT=mutants ARGS="--module runtime/caller/client.py --seed 7"
  make search WHAT=mutants ARGS="--module runtime/protocol/streams/codec.py --lines 120-139 --count 100"
"""


@attrs.frozen
class Mutant:
    """One mutation of one module."""

    module: str
    mutation: Mutation

    @property
    def text(self) -> str:
        """Where it is and what it changes, on one line."""
        before, after = (" ".join(t.split()) for t in (self.mutation.before, self.mutation.after))
        return f"{self.module}:{self.mutation.line}: {before}  ->  {after}"


class Lane:
    """A copy of the tree in which one mutant at a time lives."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self._run: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        for name in filter(None, listed.split("\0")):
            source, target = ROOT / name, folder / name
            if source.is_symlink() or source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)

    def passes(self, tests: tuple[str, ...], timeout_s: float | None) -> bool:
        """Whether the tests pass in this copy as it is now; too slow is a failure."""
        names = [str(path) for pattern in tests for path in sorted(self.root.glob(pattern))]
        assert names, f"no file is called {tests}"
        environ = {
            **os.environ,
            "PYTHONPATH": str(self.root / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
                   "-m", "not check", *names]  # fmt: skip
        if self._is_closed:
            return True
        self._run = run = subprocess.Popen(
            command, cwd=self.root, env=environ, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            return run.wait(timeout_s) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            self._end()

    def close(self) -> None:
        """Run no more tests here, and end those that run now."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()

    def kills(self, mutant: Mutant, timeout_s: float) -> bool:
        """Whether the nearest tests notice the mutant; the copy is whole again afterwards."""
        path = self.root / mutant.module
        whole = path.read_bytes()
        path.write_bytes(mutant.mutation.apply(whole))
        try:
            return not self.passes(CORE[mutant.module], timeout_s)
        finally:
            path.write_bytes(whole)


def sample(options: argparse.Namespace) -> list[Mutant]:
    """The mutants to play: every module has the same chance, then every mutation of it."""
    first, last = options.lines
    by_module = {
        module: [
            Mutant(module, each)
            for each in mutations((ROOT / module).read_bytes())
            if first <= each.line <= last
        ]
        for module in options.module or CORE
    }
    rng = random.Random(options.seed)
    for mutants in by_module.values():
        rng.shuffle(mutants)
    chosen: list[Mutant] = []
    while len(chosen) < options.count and any(by_module.values()):
        left = [module for module, mutants in by_module.items() if mutants]
        chosen.append(by_module[rng.choice(left)].pop())
    return chosen


def play(mutants: list[Mutant], lanes: list[Lane]) -> Iterator[tuple[Mutant, bool]]:
    """Each mutant with whether it was killed, as they are done.

    Raises `SystemExit` if the tests fail without a mutant: then nothing can be said.
    """
    free: SimpleQueue[Lane] = SimpleQueue()
    for lane in lanes:
        free.put(lane)
    limits: dict[str, float] = {}
    measuring = {mutant.module: threading.Lock() for mutant in mutants}

    def measured(lane: Lane, module: str) -> float:
        with measuring[module]:
            if module not in limits:
                started_at = time.perf_counter()
                if not lane.passes(CORE[module], None):
                    raise SystemExit(f"the tests of {module} fail without a mutant: {CORE[module]}")
                limits[module] = (time.perf_counter() - started_at) * _SLOWEST + _MARGIN_S
        return limits[module]

    def play_one(mutant: Mutant) -> tuple[Mutant, bool]:
        lane = free.get()
        try:
            return mutant, lane.kills(mutant, measured(lane, mutant.module))
        finally:
            free.put(lane)

    with ThreadPoolExecutor(len(lanes)) as pool:
        try:
            yield from pool.map(play_one, mutants)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for lane in lanes:
                lane.close()


def _lines(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last or first)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make search WHAT=mutants", description=__doc__, epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--count", type=int, default=60, help="mutants to play (60)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (1)")
    parser.add_argument("--lanes", type=int, default=2, help="mutants at once (2)")
    parser.add_argument(
        "--module", action="append", choices=list(CORE), metavar="FILE",
        help=f"only this module, several times for several: {', '.join(CORE)}",
    )  # fmt: skip
    parser.add_argument(
        "--lines", type=_lines, default=(1, sys.maxsize), metavar="N[-M]", help="only these lines"
    )
    return parser


def main() -> int:
    """Play the sample and print the score; 1 if a mutant stays alive."""
    options = _parser().parse_args()
    mutants = sample(options)
    if not mutants:
        sys.stderr.write("nothing to change there\n")
        return 2
    # A mutant may loop for ever: whoever ends the run ends it too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    alive: list[Mutant] = []
    with tempfile.TemporaryDirectory(prefix="trinamo-mutants-") as folder:
        lanes = [Lane(Path(folder) / str(n)) for n in range(min(options.lanes, len(mutants)))]
        for number, (mutant, is_killed) in enumerate(play(mutants, lanes), 1):
            if not is_killed:
                alive.append(mutant)
            fate = "killed" if is_killed else "ALIVE "
            print(f"{number}/{len(mutants)} {fate} {mutant.text}", flush=True)
    killed = len(mutants) - len(alive)
    share = f"{killed} of {len(mutants)} mutants killed ({killed / len(mutants):.0%})"
    print(f"\n{share}, seed {options.seed}")
    for mutant in alive:
        print(f"  alive: {mutant.text}")
    return int(bool(alive))


if __name__ == "__main__":
    sys.exit(main())
