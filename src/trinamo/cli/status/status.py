"""`trinamo status`: who is alive, under which lease, serving what."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated

import typer

from ..options import KeyEnv, Sources, Url, key_of, place_of, takes_sources


@takes_sources("etcd", "nats", "show")
def status(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    each: Annotated[
        bool,
        typer.Option("--instances", help="Each instance, however many there are."),
    ] = False,
    url: Url = None,
    key_env: KeyEnv = None,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", help="For each process to answer.", min=0.1),
    ] = 1.5,
    sources: Sources,
) -> None:
    """Show live instances, leases and models, and whether etcd and NATS are there.

    Of more than 24 instances: a row for each model and role, and those with which something is wrong.
    While etcd is away: what the frontend last knew. Exit codes: 0 all answers, 1 no cluster is
    running, 3 one is, but something of it does not answer.
    """
    if sources.printed():
        return

    import trio

    from ..failures import EXIT_DEGRADED
    from ..running.locating import locate
    from .asking import survey_cluster
    from .text import open_console, survey_json, survey_tables

    survey = trio.run(
        partial(
            survey_cluster,
            locate(sources),
            url=place_of(url),
            key=key_of(key_env),
            timeout_s=timeout_s,
        )
    )
    if as_json:
        sys.stdout.write(survey_json(survey) + "\n")
    else:
        console = open_console()
        for part in survey_tables(survey, console.width, each=each):
            console.print(part)
    if survey.away:
        raise typer.Exit(EXIT_DEGRADED)


status.__dict__["epilog"] = (
    "Examples:  trinamo status  ·  trinamo status --json  ·  "
    "trinamo status --etcd 10.0.0.5:2379 --url http://10.0.0.7:8787"
)
