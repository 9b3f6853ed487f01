"""`trinamo bench transfer`: what each transfer backend does here, between two processes.

A table and a plot of the same run, so that the backends can be compared whatever else the machine
does. The processes are in `transfer_roles.py`; bytes are compared in every row.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, Final

import attrs
import typer
from rich.console import Console
from rich.table import Table

__all__ = ["Peer", "Row", "bench_app", "measure", "transfer"]

bench_app = typer.Typer(
    name="bench", help="Measure parts of trinamo on this machine.", no_args_is_help=True
)
BENCH_BACKENDS: Final = ("tcp", "tcp same host", "nixl tcp", "nixl cma", "mooncake tcp")
"""What can be measured; `transfer_roles.py` opens them."""
_SMALL_ROUNDS: Final = 300
_BAR: Final = 40


@attrs.frozen
class Row:
    """One backend and direction. Without figures, `problem` says why."""

    backend: str
    direction: str
    gb_per_s: float = 0.0
    best_gb_per_s: float = 0.0
    mover_s_per_gb: float = 0.0
    owner_s_per_gb: float = 0.0
    lag_p99_ms: float = 0.0
    block_us: float = 0.0
    """The median of one transfer of one 4 KB block."""
    is_good: bool = False
    problem: str = ""


class Peer:
    """One child process that answers commands, a line each."""

    def __init__(self, *args: str) -> None:
        self._process = subprocess.Popen(  # noqa: S603 -- our own module
            [sys.executable, "-m", "trinamo.cli.transfer_roles", *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.ready: dict[str, Any] = {}

    def wait_ready(self) -> dict[str, Any]:
        """What it says first."""
        self.ready = self._read()
        return self.ready

    def ask(self, do: str, **fields: object) -> dict[str, Any]:
        """Its answer to one command; `RuntimeError` with its last words if it ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        line = self._process.stdout.readline()
        if not line:
            words = [each for each in self._process.stderr.read().splitlines() if each.strip()]
            raise RuntimeError(words[-1] if words else "it ended without a word")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End it."""
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def _pair(backend: str, count: int, block_bytes: int) -> Iterator[tuple[Peer, Peer]]:
    with ExitStack() as held:
        size = (str(count), str(block_bytes))
        owner = Peer("owner", backend, *size)
        held.callback(owner.close)
        description = owner.wait_ready()["description"]
        mover = Peer("mover", backend, *size, description)
        held.callback(mover.close)
        mover.wait_ready()
        yield owner, mover


def measure(
    backends: list[str],
    *,
    count: int,
    block_bytes: int,
    rounds: int,
    note: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Both directions of every backend; a backend that cannot be opened gets one row that says so."""
    rows: list[Row] = []
    for backend in backends:
        note(backend)
        try:
            with _pair(backend, count, block_bytes) as peers, _pair(backend, 16, 4096) as small:
                rows += [
                    _row(backend, direction, peers, small, rounds)
                    for direction in ("read", "write")
                ]
        except RuntimeError as error:
            rows.append(Row(backend, "", problem=str(error)))
    return rows


def _row(
    backend: str, direction: str, peers: tuple[Peer, Peer], small: tuple[Peer, Peer], rounds: int
) -> Row:
    owner, mover = peers
    description = mover.ready
    count, block_bytes = description["count"], description["block_bytes"]
    ask: dict[str, Any] = {"direction": direction, "blocks": count}
    mover.ask("run", **ask, rounds=1, lag=False)
    before = owner.ask("cpu")["cpu_s"]
    found = mover.ask("run", **ask, rounds=rounds, lag=False)
    owner_s = owner.ask("cpu")["cpu_s"] - before
    good = found["good"]
    if direction == "write":
        good = owner.ask("check", blocks=count)["good"]
    lag = mover.ask("run", **ask, rounds=rounds, lag=True)["lag_p99_ms"]
    one: dict[str, Any] = {"direction": direction, "blocks": 1, "lag": False}
    small[1].ask("run", **one, rounds=20)
    block = small[1].ask("run", **one, rounds=_SMALL_ROUNDS)
    gigabytes = count * block_bytes / 1e9
    return Row(
        backend,
        direction,
        gb_per_s=gigabytes / found["median_s"],
        best_gb_per_s=gigabytes / found["best_s"],
        mover_s_per_gb=found["cpu_s"] / (rounds * gigabytes),
        owner_s_per_gb=owner_s / (rounds * gigabytes),
        lag_p99_ms=lag,
        block_us=block["median_s"] * 1e6,
        is_good=good,
    )


def show(rows: list[Row], console: Console, title: str) -> None:
    """The table, and a bar for each row."""
    table = Table(
        title=title,
        caption="s/GB: CPU seconds per GB · lag: of the mover's event loop · 4 KB: median of one block",
    )
    for name in ("backend", "direction"):
        table.add_column(name, no_wrap=True)
    for name in ("GB/s", "best", "mover s/GB", "owner s/GB", "lag p99 ms", "4 KB us"):
        table.add_column(name, justify="right")
    table.add_column("bytes")
    for row in rows:
        if row.problem:
            table.add_row(row.backend, "", "", "", "", "", "", "", f"not here: {row.problem}")
        else:
            figures = (row.gb_per_s, row.best_gb_per_s, row.mover_s_per_gb, row.owner_s_per_gb)
            table.add_row(
                row.backend,
                row.direction,
                *(f"{each:.2f}" for each in figures),
                f"{row.lag_p99_ms:.1f}",
                f"{row.block_us:.0f}",
                "verified" if row.is_good else "WRONG",
            )
    console.print(table)
    longest = max((row.gb_per_s for row in rows), default=0.0) or 1.0
    for row in rows:
        if not row.problem:
            bar = "█" * max(1, round(_BAR * row.gb_per_s / longest))
            console.print(f"{row.backend:>14} {row.direction:<5} {bar} {row.gb_per_s:.2f}")


@bench_app.command()
def transfer(
    backend: Annotated[
        list[str] | None,
        typer.Option(help=f"One of: {', '.join(BENCH_BACKENDS)}. Repeat it; default: all."),
    ] = None,
    blocks: Annotated[int, typer.Option(min=1, max=65_536, help="Blocks of a transfer.")] = 1024,
    block_bytes: Annotated[int, typer.Option(min=512, max=1 << 26, help="Size of one.")] = 65_536,
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, help="Transfers to take the median of.")
    ] = 9,
) -> None:
    """Move KV blocks between two processes over each backend, and compare."""
    wanted = backend or list(BENCH_BACKENDS)
    for name in wanted:
        if name not in BENCH_BACKENDS:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(BENCH_BACKENDS)}")
    console = Console()
    if not console.is_terminal:
        console = Console(width=110)
    errors = Console(stderr=True)
    rows = measure(
        wanted,
        count=blocks,
        block_bytes=block_bytes,
        rounds=rounds,
        note=lambda name: errors.print(f"measuring {name} …", style="dim"),
    )
    show(rows, console, f"{blocks} blocks of {block_bytes} bytes, median of {rounds} transfers")
    if any(not row.problem and not row.is_good for row in rows):
        raise typer.Exit(1)


@bench_app.callback()
def _bench() -> None:
    """Measure parts of trinamo on this machine."""
