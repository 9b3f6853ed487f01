"""`trinamo config`: settings that may change while the cluster runs."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trinamo.runtime.logs.text import one_line

from .options import AsJson, Sources, takes_sources

if TYPE_CHECKING:
    from trinamo.runtime.planes import ControlPlane


config_app = typer.Typer(
    name="config",
    help=(
        "Settings that change while the cluster runs.\n\nThey are kept in the control plane: every"
        " process follows them, none restarts. Those called after a configuration key take its place in"
        " all processes; other keys are read at the start."
    ),
    short_help="Settings that change while the cluster runs.",
    epilog=(
        "Examples:  trinamo config get  ·  trinamo config set router.policy least_loaded  ·  "
        "trinamo config set log.level debug  ·  trinamo config set http.requests_max 512  ·  "
        "trinamo config set router.policy --reset  ·  trinamo config watch worker.requests_max"
    ),
    no_args_is_help=True,
)


def complete_setting(incomplete: str) -> list[tuple[str, str]]:
    """For tab completion: the settings, and what each is about."""
    from trinamo.runtime.process.settings import SETTINGS

    return [(name, each.about) for name, each in SETTINGS.items() if name.startswith(incomplete)]


def complete_value(ctx: typer.Context, incomplete: str) -> list[str]:
    """For tab completion: what the setting named before may be, where it takes only some texts."""
    from trinamo.runtime.process.settings import SETTINGS

    setting = SETTINGS.get(ctx.params.get("name") or "")
    return [each for each in (setting.choices if setting else ()) if each.startswith(incomplete)]


Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A setting, as `get` lists them.",
        autocompletion=complete_setting,
    ),
]
OptionalName = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", help="One setting; without it, all.", autocompletion=complete_setting
    ),
]


@config_app.command(
    "get", epilog="Examples:  trinamo config get  ·  trinamo config get router.policy --json"
)
@takes_sources("etcd")
def get(
    name: OptionalName = None,
    *,
    as_json: AsJson = False,
    sources: Sources,
) -> None:
    """Show what is in force, by process where it differs; `--json` has what is stored, or the default."""
    import msgspec

    from trinamo.runtime.process.settings import find_setting, read_settings

    from .running.locating import locate

    wanted = None if name is None else find_setting(name)
    readings = _run(read_settings, sources)
    shown = [each for each in readings if wanted is None or each.setting is wanted]
    if as_json:
        values = {each.setting.name: each.value for each in shown}
        sys.stdout.write(msgspec.json.encode(values).decode() + "\n")
        return
    told = _in_force(sources)
    config = locate(sources).config
    for each in shown:
        here = msgspec.json.encode(reduce(getattr, each.setting.name.split("."), config)).decode()
        found: dict[str, list[str]] = {}
        for who, values in told:
            if each.setting.name in values:
                value = msgspec.json.encode(values[each.setting.name]).decode()
                found.setdefault(value, []).append(who)
        own = msgspec.json.encode(each.value).decode()
        for value, processes in (found or {own: []}).items():
            origin = "set"
            if each.is_default:
                # Nothing is stored: whatever the process has, it was started with.
                is_here = value == here or not processes
                origin = "as configured" if is_here else f"as configured there, here {here}"
            who = f": {', '.join(sorted(processes))}" if len(found) > 1 else ""
            if name is None:
                sys.stdout.write(f"{each.setting.name} = {value} ({origin}{who})\n")
            else:
                sys.stdout.write(f"{value}{who}\n")
        if name is None:
            sys.stdout.write(f"    {each.setting.about}\n")
        if each.problem:
            sys.stderr.write(f"trinamo: the stored value is refused: {one_line(each.problem)}\n")


@config_app.command(
    "set",
    # A value may begin with a dash, as -3 does.
    context_settings={"ignore_unknown_options": True},
    epilog="Examples:  trinamo config set router.policy least_loaded  ·  "
    "trinamo config set http.busy_blocks 0.9  ·  trinamo config set http.busy_blocks --reset",
)
@takes_sources("etcd")
def set_value(
    name: Name,
    value: Annotated[
        str | None,
        typer.Argument(
            metavar="VALUE",
            help="As JSON, such as 512; text needs no quotes.",
            autocompletion=complete_value,
        ),
    ] = None,
    *,
    reset: Annotated[
        bool, typer.Option("--reset", help="Each process as it is configured.")
    ] = False,
    sources: Sources,
) -> None:
    """Store a value, which every process takes up at once; a bad one is refused here."""
    from trinamo.runtime.process.settings import find_setting, reset_setting, write_setting

    if (value is None) is not reset:
        raise typer.BadParameter("give a value, or --reset")
    setting = find_setting(name)
    if value is not None:
        setting.read(value)

    async def write(control: ControlPlane) -> Any:
        if value is None:
            return await reset_setting(control, name)
        return await write_setting(control, name, value)

    stored = _run(write, sources)
    sys.stdout.write(f"{name} = {setting.encode(stored).decode()}\n")


@config_app.command("watch")
@takes_sources("etcd")
def watch(
    name: Name,
    *,
    sources: Sources,
) -> None:
    """Print the value that is set, and each one that follows, until interrupted; where none is, what stands for that."""
    from trinamo.runtime.env import RealEnv
    from trinamo.runtime.metrics.metrics import Metrics
    from trinamo.runtime.nurseries import open_nursery
    from trinamo.runtime.process.settings import Settings as Followed, find_setting

    setting = find_setting(name)

    async def follow(control: ControlPlane) -> None:
        followed = Followed(control, metrics=Metrics(RealEnv()))
        async with open_nursery() as nursery:
            nursery.start_soon(followed.run)
            await followed.wait_loaded()
            value = followed.get(setting)
            while True:
                sys.stdout.write(f"{setting.encode(value).decode()}\n")
                sys.stdout.flush()
                value = await followed.wait_change(setting, value)

    _run(follow, sources)


_OF_WORKERS, _OF_FRONTENDS = ("worker.", "disaggregation."), ("router.", "http.")


def _in_force(sources: Sources) -> list[tuple[str, dict[str, Any]]]:
    """What is in force, by process; nothing if none answers. Frontends route, and have the edge."""
    import trio

    from trinamo.runtime.errors import TrinamoError

    from .running.locating import locate
    from .status.asking import survey_cluster

    try:
        survey = trio.run(survey_cluster, locate(sources))
    except TrinamoError:
        return []
    views = [(each.name, each.view.cluster) for each in survey.frontends if each.view is not None]
    told = [(name, known.settings, _OF_WORKERS) for name, known in views if known is not None]
    for each in survey.instances:
        values = (each.health or {}).get("settings")
        own = values if isinstance(values, dict) else {}
        told.append((each.name or f"worker {each.id}", own, _OF_FRONTENDS))
    return [
        (who, {key: value for key, value in own.items() if not key.startswith(others)})
        for who, own, others in told
    ]


def _run(action: Callable[[ControlPlane], Awaitable[Any]], sources: Sources) -> Any:
    import trio

    from trinamo.transports.assembly.planes import reach_control

    from .running.locating import locate

    async def act() -> Any:
        async with reach_control(locate(sources).config) as control:
            return await action(control)

    return trio.run(act)
