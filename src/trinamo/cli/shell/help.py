"""Help pages as they are read: examples on lines of their own, and no type behind a switch.

Commands say their examples as one text, `Examples:  one  ·  another`, which typer would set as a
paragraph and break in the middle of a command.
"""

from __future__ import annotations

from typing import Any, Final

import typer

HELP_OPTIONS: Final = ["-h", "--help"]

_BETWEEN: Final = "  ·  "
_HEAD: Final = "Examples:  "


def tidied(command: Any) -> Any:
    """The command of typer, changed in place with all below it."""
    if command.epilog:
        examples = command.epilog.removeprefix(_HEAD).split(_BETWEEN)
        command.epilog = "\n".join(["Examples:", *(f"  {each}" for each in examples)])
    help_option = command.get_help_option(typer.Context(command, help_option_names=HELP_OPTIONS))
    for parameter in (*command.params, help_option):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for each in getattr(command, "commands", {}).values():
        tidied(each)
    return command
