"""What `trinamo up` shows: a live table on a terminal, plain lines everywhere else.

Both take the same calls, all of them synchronous; neither knows what a cluster is. They write to
`sys.stdout`, which here is an `output.Output`: no call waits for a reader. The log of `up` itself,
such as a server that is started again, goes the same way: a handler that wrote to standard error
would tear the table apart.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Self

import attrs

from trinamo.runtime.config.config import LogConfig
from trinamo.runtime.logs.text import one_line, tell_causes

if TYPE_CHECKING:
    from rich.console import RenderableType


_COLORS: Final = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta")
_STATE_STYLES: Final = {
    "ready": "green",
    "starting": "yellow",
    "draining": "yellow",
    "waiting": "yellow",
}
_NAME_WIDTH: Final = 10
LINE_CHARACTERS_MAX: Final = 8192
"""Of a line that a child has written; its own log is cut earlier."""


@attrs.frozen
class ProcessRow:
    """One process in the table; figures that are not known are None."""

    name: str
    pid: int
    state: str
    rss_bytes: int | None = None
    cpu_percent: float | None = None
    in_flight: float | None = None
    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    note: str = ""


class Display:
    """Where a cluster's story goes: one line an event on standard output, for logs and pipes."""

    is_live = False
    """Whether `show` has an effect, so that figures are worth collecting."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, text: str) -> None:
        """Something happened."""
        self._write(one_line(text))

    def line(self, source: str, text: str) -> None:
        """A line of a child's output."""
        if text.startswith("{"):
            # JSON stays JSON: the source becomes a field of it.
            self._write(one_line(f'{{"process": "{source}", {text[1:]}', characters_max=1 << 17))
            return
        # A child's libraries write what they like, and so do those that talk to it.
        shown = one_line(text, characters_max=LINE_CHARACTERS_MAX)
        self._write(f"{source:<{_NAME_WIDTH}} | {shown}")

    def busy(self, text: str) -> None:
        """What is being waited for now; empty when nothing is."""
        if text:
            self._write(f"{text} …")

    def show(self, rows: Sequence[ProcessRow]) -> None:
        """The processes as they are."""

    def _write(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")


class LiveDisplay(Display):
    """A table that stays at the bottom of the terminal, with the events scrolling above it."""

    is_live = True

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        self._console = Console(highlight=False)
        self._live = Live(console=self._console, refresh_per_second=8, transient=True)
        self._busy = ""
        self._spinner = Spinner("dots")
        self._rows: Sequence[ProcessRow] = ()
        self._colors: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(one_line(text), style="bold"))

    def line(self, source: str, text: str) -> None:
        from rich.text import Text

        color = self._colors.setdefault(source, _COLORS[len(self._colors) % len(_COLORS)])
        told = Text(f"{source:<{_NAME_WIDTH}} │ ", style=color)
        told.append(one_line(text, characters_max=LINE_CHARACTERS_MAX))
        self._console.print(told)

    def busy(self, text: str) -> None:
        self._busy = text
        # At once: a phase may be over before the next of the regular refreshes.
        self._draw(refresh=True)

    def show(self, rows: Sequence[ProcessRow]) -> None:
        self._rows = rows
        self._draw()

    def _draw(self, *, refresh: bool = False) -> None:
        from rich.console import Group
        from rich.text import Text

        parts: list[RenderableType] = []
        if self._rows:
            parts.append(_table(self._rows))
        if self._busy:
            # One object all along: a new one would begin to turn again with every row.
            self._spinner.update(text=f" {self._busy} …")
            parts.append(self._spinner)
        else:
            parts.append(Text("Ctrl-C drains and ends the cluster.", style="dim"))
        self._live.update(Group(*parts), refresh=refresh)


def _table(rows: Sequence[ProcessRow]) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("process", "pid", "state"):
        table.add_column(name)
    for name in ("RSS", "CPU", "in flight", "req/s", "tok/s"):
        table.add_column(name, justify="right")
    table.add_column("where")
    for row in rows:
        rss = None if row.rss_bytes is None else row.rss_bytes / 1e6
        table.add_row(
            row.name,
            str(row.pid or "-"),
            Text(row.state, style=_STATE_STYLES.get(row.state, "red")),
            _figure(rss, "{:.0f} MB"),
            _figure(row.cpu_percent, "{:.0f} %"),
            _figure(row.in_flight, "{:.0f}"),
            _figure(row.requests_per_s, "{:.1f}"),
            _figure(row.tokens_per_s, "{:.0f}"),
            Text(one_line(row.note)),
        )
    return table


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def open_display(*, plain: bool = False) -> Display:
    """The live display on a terminal, else the plain one."""
    return LiveDisplay() if sys.stdout.isatty() and not plain else Display()


class _DisplayHandler(logging.Handler):
    def __init__(self, display: Display) -> None:
        super().__init__()
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        cause = "" if error is None else f": {tell_causes(error)}"
        self._display.line("up", f"{record.getMessage()}{cause}")


@contextmanager
def show_log(display: Display, config: LogConfig) -> Iterator[None]:
    """Send this process's log events to the display while inside."""
    root = logging.getLogger()
    handler = _DisplayHandler(display)
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.getLevelNamesMapping()[config.level.upper()])
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
