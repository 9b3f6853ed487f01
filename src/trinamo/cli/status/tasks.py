"""`trinamo tasks`: the nurseries of live processes, and what each task in them waits for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from trinamo.runtime.logs.text import one_line

from ..options import KeyEnv, Sources, key_of, place_of, takes_sources

if TYPE_CHECKING:
    from rich.tree import Tree

    from trinamo.runtime.process.tasks import TasksView, TaskView

ROWS_MAX: Final = 200
"""Drawn of one process."""


@takes_sources("etcd", "nats")
def tasks(
    process: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME|PID", help="One process: its name or instance id, or its pid."
        ),
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    url: Annotated[
        str | None,
        typer.Option("--url", help="A status port to ask, instead of those of the cluster."),
    ] = None,
    key_env: KeyEnv = None,
    sources: Sources,
) -> None:
    """Draw the tree of nurseries and tasks of each process: where each waits, and for how long.

    Equal tasks of a nursery are one row. How long is a lower bound, to ten seconds. A status port
    beyond loopback tells it for an operator's key, which is sent to the one that `--url` names and
    to no other. Exit codes: 0 told, 1 there is nobody to ask.
    """
    import msgspec
    import trio

    from trinamo.runtime.errors import UnavailableError
    from trinamo.runtime.process.tasks import TasksView
    from trinamo.runtime.view.requests import ask_places
    from trinamo.transports.openai.client import fetch

    from ..running.locating import locate
    from .asking import find_places

    async def ask() -> tuple[list[tuple[str, TasksView]], list[str]]:
        place, key = place_of(url), key_of(key_env)
        places, keys = {place: place}, {place: key}
        if not place:
            places, keys = await find_places(locate(sources), "", key)
        return await ask_places(fetch, "/tasks", TasksView, places, keys)

    told, away = trio.run(ask)
    told.sort(key=lambda each: each[0])
    found = [
        (name, view)
        for name, view in told
        if process in (None, name, name.rpartition(" ")[2], str(view.pid))
    ]
    if as_json:
        shown = {"away": away, "processes": [{"name": name, "tree": view} for name, view in found]}
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(shown)) + b"\n")
    else:
        from .text import open_console

        for sentence in away:
            sys.stderr.write(f"trinamo: {sentence}\n")
        console = open_console()
        for name, view in found:
            console.print(_draw(name, view))
    if not found:
        names = ", ".join(f"{name} (pid {view.pid})" for name, view in told)
        raise UnavailableError(
            f"no process {process} here; there are: {names}" if told else "; ".join(away)
        )


def _draw(name: str, view: TasksView) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    tree = Tree(Text(f"{one_line(name)}, pid {view.pid}: {view.tasks} tasks"))
    rows, stack = 0, [(view.root, tree)]
    while stack and rows < ROWS_MAX:
        task, above = stack.pop()
        here = above.add(Text(_row(task)))
        rows += 1
        below: list[tuple[TaskView, Tree]] = []
        filled = [each for each in task.nurseries if each.tasks]
        for nursery in filled:
            is_plain = len(filled) == 1 and not nursery.is_cancelled
            label = "nursery, cancelled" if nursery.is_cancelled else "nursery"
            branch = here if is_plain else here.add(Text(label, style="dim"))
            below += [(child, branch) for child in nursery.tasks]
        stack += reversed(below)
    if stack or view.left_out:
        tree.add(Text(f"… and more; `--json` has all but {view.left_out} tasks"))
    return tree


def _row(task: TaskView) -> str:
    """One task, or several equal ones, in a line."""
    waits = f"waits in {task.waits_in}" if task.waits_in else "runs"
    since = f" for {task.since_s:.0f} s" if task.since_s >= 1 else ""
    where = f" at {task.place} {task.function}" if task.place else ""
    count = f" ×{task.count}" if task.count > 1 else ""
    return one_line(f"{task.name}{count}: {waits}{since}{where}", characters_max=400)


tasks.__dict__["epilog"] = (
    "Examples:  trinamo tasks  ·  trinamo tasks worker-1  ·  trinamo tasks 4711 --json  ·  "
    "trinamo tasks --url http://10.0.0.7:9090 --key-env OPERATOR_KEY"
)
