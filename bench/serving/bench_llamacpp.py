"""A model by `trinamo up` with nothing else said, beside llama.cpp's own server: same file, same prompts.

Both are asked in turns, in one run, for completions at temperature 0, by 1, 4 and 16 clients at once:
tokens a second of all, the median time between two tokens of one, and, of one client alone, how long until the
first token of a prompt that is new, that comes again, and that goes on behind its first form. Medians of the
rounds, and the quotient: of each round, so that what else the machine does changes it little.

    python bench/serving/bench_llamacpp.py [--rounds 5] [--tokens 64]

llama.cpp's server is that of the wheel `xllamacpp` with its defaults, but for 16 slots that share the 8192
cells which trinamo's engine has, and the threads of `--threads` (all cores, as `trinamo up` takes them).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import trio

# The streams and the description of the machine are those of the other benchmarks.
sys.path.insert(0, str(Path(__file__).parents[1]))

from load.streams import Answer
from report.results import described, machine

from trinamo.runtime.engines.llamacpp.model_file import MODEL_NAME, find_model

CLIENTS = (1, 4, 16)
CELLS = 8192
START_S = 120
WORDS = "The river that runs through the old town is wide and slow, and on its banks people "
FURTHER = "sell bread and fish, and in the evening they tell each other what the day has brought. "
PASSAGES = 8
"""Of a prompt whose first token is waited for: some 300 tokens."""


class Target:
    """A server, and what it was measured to do, by figure."""

    def __init__(self, name: str, port: int) -> None:
        self.name, self.port = name, port
        self.found: dict[str, list[float]] = {}

    def add(self, figure: str, value: float) -> None:
        self.found.setdefault(figure, []).append(value)

    async def measure(self, number: int, clients: int, tokens: int) -> None:
        """So many clients at once; no two prompts of a run begin alike."""
        answers = [
            self._ask(f"{number}.{clients}.{each} {WORDS}", tokens) for each in range(clients)
        ]
        async with trio.open_nursery() as nursery:
            for answer in answers:
                nursery.start_soon(answer.run)
        begin = min(each.asked_at for each in answers)
        end = max(each.read_at[-1] for each in answers)
        self.add(f"tokens/s, {clients}", sum(each.events for each in answers) / (end - begin))
        gaps = [gap for each in answers for gap in each.gaps_ms(begin, end)]
        self.add(f"ms a token, {clients}", median(gaps))

    async def measure_first(self, number: int) -> None:
        """One client that waits for first tokens: of a new prompt, the same, and one behind it."""
        prompt = f"{number} " + (WORDS + FURTHER) * PASSAGES + WORDS
        for what, text in (("new", prompt), ("repeated", prompt), ("continued", prompt + FURTHER)):
            answer = self._ask(text, 4)
            await answer.run()
            self.add(f"first token, {what}", answer.first_ms)

    def _ask(self, prompt: str, tokens: int) -> Answer:
        return Answer(self.port, MODEL_NAME, prompt, tokens, temperature=0)


@contextmanager
def trinamo(folder: Path, arguments: list[str]) -> Iterator[int]:
    """`trinamo up`; yields its port."""
    command = [sys.executable, "-m", "trinamo.cli", "up", "--port", "0", "--plain", *arguments]
    with started(command, folder, r"The cluster is ready: http://[^:]+:(\d+)") as port:
        yield port


@contextmanager
def server(folder: Path, threads: int) -> Iterator[int]:
    """llama.cpp's; yields its port."""
    command = [sys.executable, __file__, "--serve", "--threads", str(threads)]
    with started(command, folder, r"^http://[^:]+:(\d+)") as port:
        yield port


@contextmanager
def started(command: list[str], folder: Path, ready: str) -> Iterator[int]:
    """A command, once its output says where it listens."""
    log = folder / "log"
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TRINAMO_")}
    environ |= {"TMPDIR": str(folder), "XDG_RUNTIME_DIR": str(folder), "PYTHONUNBUFFERED": "1"}
    if model := os.environ.get("TRINAMO_MODEL"):
        environ["TRINAMO_MODEL"] = model
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ
        )
    try:
        deadline = time.monotonic() + START_S
        while not (found := re.search(ready, log.read_text("utf-8", "replace"), re.MULTILINE)):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{' '.join(command)} did not start:\n{log.read_text()}")
            time.sleep(0.05)
        said = [line for line in log.read_text().splitlines() if "workers " in line]
        print("#", *(said or [f"{' '.join(command[1:])}"]))
        yield int(found[1])
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def serve(threads: int) -> None:
    """llama.cpp's server until the process is ended."""
    import xllamacpp

    params: Any = xllamacpp.CommonParams()
    params.model.path = str(find_model())
    params.model_alias = {MODEL_NAME}
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.n_ctx, params.n_parallel, params.kv_unified = CELLS, max(CLIENTS), True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_threads_http = 2 * max(CLIENTS)
    running = xllamacpp.Server(params)
    print(running.listening_address, flush=True)
    while True:
        time.sleep(60)


async def measure(targets: list[Target], rounds: int, tokens: int) -> None:
    for number in range(rounds + 1):
        for clients in CLIENTS:
            for target in targets:
                await target.measure(number, clients, tokens)
        for target in targets:
            await target.measure_first(number)
        if not number:
            # Of the first round pages are read, and memory is made.
            for target in targets:
                target.found.clear()
        else:
            print(f"# round {number}", *table(*targets), sep="\n", file=sys.stderr, flush=True)


def table(ours: Target, theirs: Target) -> Iterator[str]:
    yield f"| | {ours.name} | {theirs.name} | quotient |"
    yield "|---|---|---|---|"
    for figure, found in ours.found.items():
        others = theirs.found[figure]
        each = sorted(a / b for a, b in zip(found, others, strict=True))
        quotient = f"{median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})"
        yield f"| {figure} | {median(found):.1f} | {median(others):.1f} | {quotient} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="to see that it works")
    parser.add_argument("--json", type=Path, help="where the figures of all rounds go")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("up", nargs="*", help="options of `trinamo up`, behind --")
    given = parser.parse_args()
    if given.serve:
        serve(given.threads)
    rounds, tokens = (1, 8) if given.quick else (given.rounds, given.tokens)
    with ExitStack() as held:
        folders = [Path(held.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        ours = Target("trinamo up", held.enter_context(trinamo(folders[0], given.up)))
        theirs = Target("llama.cpp", held.enter_context(server(folders[1], given.threads)))
        trio.run(measure, [ours, theirs], rounds, tokens)
    print(described(machine()), "", *table(ours, theirs), sep="\n")
    if given.json:
        given.json.write_text(json.dumps({each.name: each.found for each in (ours, theirs)}))


if __name__ == "__main__":
    main()
