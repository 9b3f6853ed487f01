"""`trinamo doctor`: what is there, what is missing, and the command that mends it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..failures import EXIT_FAILED
from ..options import KeyEnv, Sources, Url, key_of, place_of, takes_sources


@takes_sources("etcd", "nats", "show")
def doctor(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list of findings.")] = False,
    url: Url = None,
    key_env: KeyEnv = None,
    sources: Sources,
) -> None:
    """Check installation, servers, model, limits, and what moves KV blocks; dial what is registered.

    Exit codes: 0 nothing that the configuration needs is missing, 1 something is, 2 the
    configuration is wrong.
    """
    if sources.printed():
        return

    import trio

    from ..running.locating import Target, locate
    from ..status.asking import is_alone
    from .examination import examine
    from .finding import Finding, FindingVerdict, findings_table

    async def look() -> list[Finding]:
        place, key = place_of(url), key_of(key_env)
        target = locate(sources)
        if place and await is_alone(target.config, place, key):
            # Another cluster that runs here is not this frontend's.
            target = Target(sources.load(), None, is_named=False)
        return await examine(target, place, key)

    findings = trio.run(look)
    if as_json:
        import json

        import attrs

        sys.stdout.write(json.dumps([attrs.asdict(each) for each in findings], indent=2) + "\n")
    else:
        from ..status.text import open_console

        open_console().print(findings_table(findings))
    missing = [each for each in findings if each.verdict == FindingVerdict.MISSING]
    if missing:
        sys.stderr.write(
            f"trinamo: {len(missing)} needed and missing: {', '.join(e.what for e in missing)}\n"
        )
        raise typer.Exit(EXIT_FAILED)


doctor.__dict__["epilog"] = (
    "Examples:  trinamo doctor  ·  trinamo doctor --json  ·  trinamo doctor --config cluster.yaml  ·  "
    "trinamo doctor --set data_plane.nixl.enabled=true"
)
