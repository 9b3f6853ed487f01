"""`trinamo completion bash|zsh|fish`: what a shell is told, so that it completes our commands.

And what is offered for `--engine`: ours by name, and what files of the current folder decorate as
an engine. Nothing is imported: files are only read.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final, Literal

import typer
from typer._completion_shared import get_completion_script

from trinamo.runtime.config.models import ENGINES

FILES_MAX: Final = 256
FILE_BYTES_MAX: Final = 1 << 20
_DECORATED: Final = re.compile(
    r"^@(?:trinamo\.)?engine\b.*?^(?:async +def|def|class) +(\w+)", re.MULTILINE | re.DOTALL
)
_VARIABLE: Final = "_TRINAMO_COMPLETE"
# Typer's own for bash takes the words as bash does, which ends one at `=` and at `:`: neither
# `--set key=value` nor `--engine file.py:name` would ever be completed behind it.
_BASH: Final = r"""
_trinamo_completion() {
    local line="${COMP_LINE:0:COMP_POINT}" current offered words
    IFS=$' \t' read -r -a words <<< "$line"
    [[ "$line" == *[[:blank:]] ]] && words+=("")
    current="${words[-1]}"
    mapfile -t COMPREPLY < <(COMP_WORDS="$line" COMP_CWORD=$(( ${#words[@]} - 1 )) \
        _TRINAMO_COMPLETE=complete_bash "$1" 2>/dev/null)
    # Where a file is wanted there is one offer, of nothing: bash knows files itself.
    [[ -z "${COMPREPLY[0]}" ]] && COMPREPLY=()
    # An offer takes the place of what stands behind the last separator of bash alone.
    local separators="${COMP_WORDBREAKS//[^=:]/}"
    if [[ -n "$separators" && "$current" == *[$separators]* ]]; then
        offered="${current##*[$separators]}"
        COMPREPLY=( "${COMPREPLY[@]#"${current%"$offered"}"}" )
    fi
    [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *= ]] && compopt -o nospace
    return 0
}
complete -o default -o nosort -F _trinamo_completion trinamo
"""


def completion(
    shell: Annotated[
        Literal["bash", "zsh", "fish"],
        typer.Argument(metavar="SHELL", help="bash, zsh or fish."),
    ],
) -> None:
    """Print the script by which a shell completes commands, options, settings, models and queues."""
    script = (
        _BASH
        if shell == "bash"
        else get_completion_script(prog_name="trinamo", complete_var=_VARIABLE, shell=shell)
    )
    sys.stdout.write(f"{script.strip()}\n")


completion.__dict__["epilog"] = (
    "Examples:  source <(trinamo completion bash)  ·  trinamo completion bash >> ~/.bashrc  ·  "
    "source <(trinamo completion zsh)  ·  "
    "trinamo completion fish > ~/.config/fish/completions/trinamo.fish"
)


def complete_engine(incomplete: str) -> list[str]:
    """The engines whose names begin so."""
    found = list(ENGINES)
    folder = incomplete.rpartition("/")[0]
    prefix = f"{folder}/" if folder or incomplete.startswith("/") else ""
    with suppress(OSError):
        for path in sorted(Path(prefix or ".").glob("*.py"))[:FILES_MAX]:
            with path.open("rb") as file:
                text = file.read(FILE_BYTES_MAX).decode("utf-8", "replace")
            found += [f"{prefix}{path.name}:{name}" for name in _DECORATED.findall(text)]
    return [name for name in found if name.startswith(incomplete)]
