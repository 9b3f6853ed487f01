"""The command tree, and what the process exits with.

Exit codes: 0 it went well, 1 it could not be started or done, 2 the usage or configuration is
wrong, 3 `trinamo status` misses a part of the cluster, 130 a second Ctrl-C cut the orderly end
short; `trinamo sim` has more. Each command is a
module of its own.
"""

from __future__ import annotations

import copy
import io
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Final

import typer
from typer._completion_classes import completion_init

from .bench.transfer import bench_app
from .chat.chat import chat
from .completion import completion
from .doctor.doctor import doctor
from .failures import guarded
from .queue import queue_app
from .serve.serving import frontend, worker
from .settings import config_app
from .sim.sim import sim
from .status.status import status
from .status.tasks import tasks
from .trace.trace import trace
from .up.certs import certs_app
from .up.up import up

HELP_OPTIONS: Final = ["-h", "--help"]

app = typer.Typer(
    name="trinamo",
    help="trinamo: a distributed runtime for LLM inference. Start with `trinamo up`.",
    epilog=(
        "Examples:  trinamo up  ·  trinamo up --engine exact --workers 4  ·  "
        'trinamo chat "Say hello"  ·  trinamo status  ·  trinamo doctor'
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": HELP_OPTIONS},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"trinamo {version('trinamo')}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """A distributed runtime for LLM inference: three planes, every task in a nursery."""


for _command in (up, frontend, worker, status, tasks, trace, chat, doctor, completion):
    app.command(_command.__name__, epilog=_command.__dict__.get("epilog"))(_command)


app.add_typer(sim, name="sim")

app.add_typer(queue_app)
app.add_typer(config_app)
app.add_typer(certs_app)
app.add_typer(bench_app)


def _tidied(command: Any) -> Any:
    """The command of typer, changed in place with all below it: help as it is read.

    Commands say their examples as one text, `Examples:  one  ·  another`, which typer would set as
    a paragraph and break in the middle of a command. A switch has no type behind it. A number is
    finite: `nan` passes every comparison with a bound.
    """
    if command.epilog:
        examples = command.epilog.removeprefix("Examples:  ").split("  ·  ")
        command.epilog = "\n".join(["Examples:", *(f"  {each}" for each in examples)])
    help_option = command.get_help_option(typer.Context(command, help_option_names=HELP_OPTIONS))
    for parameter in (*command.params, help_option):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        if parameter.type.name.startswith("float"):
            parameter.type = copy.copy(parameter.type)
            parameter.type.convert = partial(_finite, parameter.type.convert)
    for each in getattr(command, "commands", {}).values():
        _tidied(each)
    return command


def _finite(convert: Callable[..., float], value: Any, parameter: Any, context: Any) -> float:
    found = convert(value, parameter, context)
    if not math.isfinite(found):
        parameter.type.fail(f"{value!r} is not a finite number.", parameter, context)
    return found


def _settle_streams() -> None:
    """Give a process that was started without its standard streams some that lead nowhere.

    Where the others cannot show a character, such as an arrow without UTF-8, is a question mark.
    """
    # One that is free would be that of the next file or socket, which who prints would write to.
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="replace")


def main() -> None:
    """Run the command line of this process and exit."""
    _settle_streams()
    completion_init()
    sys.exit(guarded(_tidied(typer.main.get_command(app))))
