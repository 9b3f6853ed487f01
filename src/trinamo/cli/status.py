"""`trinamo status`: who is alive, under which lease, serving what."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .options import (
    ConfigFile,
    EtcdEndpoints,
    NatsServers,
    Preset,
    PrintConfig,
    Settings,
    Sources,
    gather,
    print_config,
)

__all__ = ["status"]


def status(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    etcd: EtcdEndpoints = None,
    nats: NatsServers = None,
    config: ConfigFile = None,
    preset: Preset = None,
    settings: Settings = None,
    show_config: PrintConfig = False,
) -> None:
    """Show live instances, leases and models; exit 1 if no cluster is running."""
    overrides = gather(
        settings, control_plane__etcd__endpoints=etcd, event_plane__nats__servers=nats
    )
    sources = Sources(config, preset, overrides)
    if show_config:
        print_config(sources.load())
        return

    import trio

    from .locating import locate, quiet_log
    from .survey import survey_cluster
    from .survey_text import survey_json, survey_tables

    quiet_log()
    survey = trio.run(survey_cluster, locate(sources))
    if as_json:
        sys.stdout.write(survey_json(survey) + "\n")
        return

    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    for part in survey_tables(survey):
        console.print(part)


status.__dict__["epilog"] = (
    "Examples:  trinamo status  ·  trinamo status --json  ·  trinamo status --etcd 10.0.0.5:2379"
)
