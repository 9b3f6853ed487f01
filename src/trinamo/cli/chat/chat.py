"""`trinamo chat`: ask the cluster, and see the answer as it is generated."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated, Final

import typer

from ..options import KeyEnv, Sources, key_of, place_of, sources_of, takes_sources

COMPLETION_TIMEOUT_S: Final = 1.0
"""Somebody has pressed a key and waits."""


def complete_model(ctx: typer.Context, incomplete: str) -> list[str]:
    """For tab completion: the models of the frontend meant, if it answers soon."""
    try:
        import trio

        from trinamo.runtime.http.transport import fetch_json
        from trinamo.transports.openai.client import fetch

        from ..running.locating import frontend_url, locate

        base = ctx.params.get("url") or frontend_url(locate(sources_of(ctx.params)))
        url = f"{place_of(base)}/v1/models"
        found = trio.run(partial(fetch_json, fetch, url, timeout_s=COMPLETION_TIMEOUT_S))
        names = [str(each["id"]) for each in found["data"]]
    except Exception:  # noqa: BLE001 -- a shell that completes has no place for it
        return []
    return [name for name in names if name.startswith(incomplete)]


@takes_sources("show")
def chat(
    prompt: Annotated[
        str | None,
        typer.Argument(help="What to say; without it a conversation begins, or a pipe is read."),
    ] = None,
    *,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Which model; else the cluster's default.",
            autocompletion=complete_model,
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="Instructions that come before the prompt.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Longest answer.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0, max=2, help="0 is the likeliest answer.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option("--url", help="The frontend, such as http://127.0.0.1:8787."),
    ] = None,
    key_env: KeyEnv = None,
    sources: Sources,
) -> None:
    """Stream an answer to the terminal; Ctrl-C stops it."""
    if sources.printed():
        return

    from ..running.locating import frontend_url, locate
    from .conversation import Conversation, converse

    base = url or frontend_url(locate(sources))
    talk = Conversation(
        base,
        model=model,
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
        key=key_of(key_env),
    )
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().strip()
    if prompt is None:
        converse(talk)
    elif not talk.ask(prompt):
        raise typer.Exit(130)


chat.__dict__["epilog"] = (
    'Examples:  trinamo chat "Name three colours."  ·  trinamo chat --system "Be brief."  ·  '
    "git diff | trinamo chat --max-tokens 64"
)
