"""`trinamo trace`: where the time of one request went."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from ..options import KeyEnv, Sources, Url, key_of, place_of, takes_sources

_ID: Final = re.compile(r"[A-Za-z0-9._:\-]{1,256}")


def _complete(incomplete: str) -> list[str]:
    """Ids of the last requests; a shell that asks must get an answer, be it none."""
    from contextlib import suppress

    import trio

    from trinamo.runtime.errors import TrinamoError

    from ..status.asking import recent_ids

    with suppress(TrinamoError, OSError):
        return [each for each in trio.run(recent_ids) if each.startswith(incomplete)]
    return []


@takes_sources("etcd", "nats")
def trace(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID",
            help="The `x-request-id` of the answer, its `id`, or the request_id of a log line.",
            autocompletion=_complete,
        ),
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page that needs no other file."),
    ] = None,
    url: Url = None,
    key_env: KeyEnv = None,
    sources: Sources,
) -> None:
    """Show one request's way through all processes of the cluster, on a time line.

    Each process keeps its last requests in memory (`traces.requests_max`); with `tracing.enabled`
    it also sends them to an OpenTelemetry collector. Exit codes: 0 found, 1 nobody knows the
    request, or no cluster is running.
    """
    import trio

    from trinamo.runtime.errors import RequestError, UnavailableError

    from ..running.locating import locate
    from ..status.asking import ask_cluster
    from .timeline import time_line, timeline_json

    if not _ID.fullmatch(request_id):
        raise RequestError("this is no request id: letters, digits and . _ : - , at most 256")
    target = locate(sources)
    answers = trio.run(
        partial(ask_cluster, target, request_id, url=place_of(url), key=key_of(key_env))
    )
    line = time_line(answers)
    if as_json:
        sys.stdout.write(timeline_json(line, answers) + "\n")
    for sentence in () if as_json else answers.away:
        sys.stderr.write(f"trinamo: {sentence}\n")
    if line is None:
        if not answers.keeping:
            raise UnavailableError(
                f"none of the {answers.asked} processes keeps traces: traces.requests_max is 0 there,"
                " or they do not answer"
            )
        raise UnavailableError(
            f"none of the {answers.asked} processes knows the request {request_id}: it is older than"
            " their last requests (traces.requests_max), it was another cluster's, or the process"
            " that had it has ended"
        )
    if html is not None:
        from .page import timeline_page

        html.write_text(timeline_page(line), encoding="utf-8")
        sys.stderr.write(f"wrote {html}\n")
    if not as_json and html is None:
        from ..status.text import open_console
        from .text import timeline_text

        console = open_console()
        for part in timeline_text(line, console.width):
            console.print(part)


trace.__dict__["epilog"] = (
    "Examples:  trinamo trace 5f2c9a…  ·  trinamo trace my-id --json  ·  "
    "trinamo trace my-id --html trace.html"
)
