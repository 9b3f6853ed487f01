"""The arguments and options that several commands of `trinamo sim` take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .files import complete_scenario

PolicyName = Literal["batch", "choice", "fifo", "grouped", "pct", "step"]
StreamsName = Literal["multiplexed", "dedicated"]

File = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="A scenario file, FILE.py::FUNCTION, or the name of a shipped one.",
        autocompletion=complete_scenario,
    ),
]
Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE]…",
        help="As FILE of `run`; all scenarios that ship if none is given.",
        autocompletion=complete_scenario,
    ),
]
FailFile = Annotated[Path, typer.Argument(metavar="FAIL.json", help="A failure file.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Which run of the scenario.")]
PolicyOption = Annotated[
    PolicyName | None,
    typer.Option("--policy", help="How tasks are scheduled, in place of the file's own."),
]
StreamsOption = Annotated[
    StreamsName | None,
    typer.Option("--streams", help="What streams travel on, in place of what the file says."),
]
Bug = Annotated[
    str, typer.Option("--bug", metavar="NAME", help="Plant a known mistake, as the mutants do.")
]
Html = Annotated[Path | None, typer.Option("--html", metavar="OUT", help="Draw the run here.")]
Loose = Annotated[
    bool,
    typer.Option("--loose", help="Go on if versions or rows are not those that were recorded."),
]
