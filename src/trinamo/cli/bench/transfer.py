"""`trinamo bench transfer`: what each transfer backend does here, between two processes.

A table and a plot of the same run, so that the backends can be compared whatever else the machine
does. The processes are in `transfer_roles.py`, the table and the plot in `transfer_text.py`; bytes
are compared in every row.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ..failures import EXIT_FAILED
from .transfer_text import TransferRow, rows_json, rows_svg, show

bench_app = typer.Typer(
    name="bench", help="Measure parts of trinamo on this machine.", no_args_is_help=True
)
BENCH_BACKENDS: Final = ("tcp", "tcp sealed", "nixl tcp", "nixl cma", "mooncake tcp")
"""What can be measured; `transfer_roles.py` opens them."""
DIRECTIONS: Final = ("read", "write")
_SMALL_ROUNDS: Final = 300
_BYTES_MAX: Final = 4 << 30
"""Of one transfer; each process holds twice as much."""


class Peer:
    """One child process that answers commands, a line each."""

    def __init__(self, *args: str) -> None:
        # Libraries may say more there than a pipe holds, and nobody reads it before the end.
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 -- see `close`
        self._process = subprocess.Popen(  # noqa: S603 -- our own module
            [sys.executable, "-m", "trinamo.cli.bench.transfer_roles", *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
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
        # One that has ended has left its last words to be read.
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait(10)
            self._errors.seek(0)
            words = [each for each in self._errors.read(1 << 20).splitlines() if each.strip()]
            last = words[-1].removeprefix("trinamo: ") if words else ""
            raise RuntimeError(last or f"its process ended with status {status}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End it."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


@contextmanager
def open_pair(backend: str, count: int, block_bytes: int) -> Iterator[tuple[Peer, Peer]]:
    """The owner of blocks and the mover; `RuntimeError` says why the backend cannot be opened."""
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
) -> list[TransferRow]:
    """Both directions of every backend; a backend that cannot be opened gets one row that says so.

    `note` is told what begins: each backend, then each direction of it. Blocks; `Ctrl-C` ends the
    processes.
    """
    rows: list[TransferRow] = []
    for backend in backends:
        note(backend)
        try:
            with (
                open_pair(backend, count, block_bytes) as peers,
                open_pair(backend, 16, 4096) as small,
            ):
                for direction in DIRECTIONS:
                    note(f"{backend} {direction}")
                    rows.append(_row(backend, direction, peers, small, rounds))
        except RuntimeError as error:
            rows.append(TransferRow(backend, "", problem=str(error)))
    return rows


def _run(peers: tuple[Peer, Peer], direction: str, blocks: int, **more: object) -> dict[str, Any]:
    """What the mover found; `good` covers the memory of both processes."""
    owner, mover = peers
    found = mover.ask("run", direction=direction, blocks=blocks, **{"lag": False} | more)
    if direction == "write":
        found["good"] = owner.ask("check", blocks=blocks)["good"]
    return found


def _row(
    backend: str, direction: str, peers: tuple[Peer, Peer], small: tuple[Peer, Peer], rounds: int
) -> TransferRow:
    owner, mover = peers
    count, block_bytes = mover.ready["count"], mover.ready["block_bytes"]
    _run(peers, direction, count, rounds=1)
    before = owner.ask("cpu")["cpu_s"]
    found = mover.ask("run", direction=direction, blocks=count, rounds=rounds, lag=False)
    owner_s = owner.ask("cpu")["cpu_s"] - before
    if direction == "write":
        found["good"] = owner.ask("check", blocks=count)["good"]
    late = _run(peers, direction, count, rounds=rounds, lag=True)
    _run(small, direction, 1, rounds=20)
    block = _run(small, direction, 1, rounds=_SMALL_ROUNDS)
    gigabytes = count * block_bytes / 1e9
    return TransferRow(
        backend,
        direction,
        gb_per_s=gigabytes / statistics.median(found["took_s"]),
        best_gb_per_s=gigabytes / min(found["took_s"]),
        mover_s_per_gb=found["cpu_s"] / (rounds * gigabytes),
        owner_s_per_gb=owner_s / (rounds * gigabytes),
        lag_p99_ms=late["lag_p99_ms"],
        block_us=statistics.median(block["took_s"]) * 1e6,
        is_good=all(each["good"] for each in (found, late, block)),
    )


# --- the command ---------------------------------------------------------------------------------


@contextmanager
def _progress(step_count: int) -> Iterator[Callable[[str], None]]:
    """Says on standard error what is being measured: a bar on a terminal, lines elsewhere."""
    from rich.console import Console

    errors = Console(stderr=True)
    if not errors.is_terminal:
        yield lambda name: errors.print(f"measuring {name} …")
        return
    from rich.progress import Progress

    with Progress(console=errors, transient=True) as progress:
        task = progress.add_task("measuring", total=step_count)

        def note(name: str) -> None:
            progress.update(task, description=f"measuring {name}")
            progress.advance(task)

        yield note


@bench_app.command(
    epilog=(
        "Examples:  trinamo bench transfer  ·  trinamo bench transfer --backend tcp --backend 'nixl "
        "cma' --plot transfer.svg  ·  trinamo bench transfer --blocks 4096 --json"
    )
)
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
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Write the bars as a picture, too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, no table.")] = False,
) -> None:
    """Move KV blocks between two processes over each backend, and compare.

    Exit codes: 0 it went well, 1 bytes were wrong or a backend that was asked for by name is not
    here, 2 the usage is wrong.
    """
    wanted = list(dict.fromkeys(backend or BENCH_BACKENDS))
    for name in wanted:
        if name not in BENCH_BACKENDS:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(BENCH_BACKENDS)}")
    if blocks * block_bytes > _BYTES_MAX:
        raise typer.BadParameter(
            f"{blocks} blocks of {block_bytes} bytes are more than {_BYTES_MAX >> 30} GiB"
        )
    if plot is not None and plot.suffix != ".svg":
        raise typer.BadParameter(f"--plot writes SVG: name the file {plot.stem}.svg")
    if plot is not None and not plot.absolute().parent.is_dir():
        raise typer.BadParameter(f"--plot: there is no folder {plot.absolute().parent}")
    with _progress(len(wanted) * (1 + len(DIRECTIONS))) as note:
        rows = measure(wanted, count=blocks, block_bytes=block_bytes, rounds=rounds, note=note)
    title = f"{blocks} blocks of {block_bytes} bytes, median of {rounds} transfers"
    if as_json:
        sys.stdout.write(rows_json(rows, blocks=blocks, block_bytes=block_bytes, rounds=rounds))
    else:
        from rich.console import Console

        console = Console()
        show(rows, console if console.is_terminal else Console(width=110), title)
    if plot is not None:
        plot.write_text(rows_svg(rows, title), "utf-8")
    _judge(rows, named=backend is not None)


def _judge(rows: list[TransferRow], *, named: bool) -> None:
    """Exit 1 for wrong bytes, and for a backend that was named and is not here."""
    wrong = [f"{row.backend} {row.direction}" for row in rows if not (row.problem or row.is_good)]
    if wrong:
        sys.stderr.write(f"trinamo: wrong bytes arrived by {', '.join(wrong)}\n")
    away = [row for row in rows if row.problem] if named else []
    for row in away:
        sys.stderr.write(f"trinamo: {row.backend} cannot be measured here: {row.problem}\n")
    if away:
        sys.stderr.write("trinamo: `trinamo doctor` says what is missing\n")
    if wrong or away:
        raise typer.Exit(EXIT_FAILED)


@bench_app.callback()
def _bench() -> None:
    """Measure parts of trinamo on this machine."""
