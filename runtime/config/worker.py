"""What one worker process is called, what it runs, and how much of it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .keys import Count, Name, Port, Seconds, Section, Text, Tokens, about

__all__ = ["WorkerConfig"]


class WorkerConfig(Section, frozen=True, kw_only=True):
    """One worker process: what it is called and what it runs."""

    namespace: Annotated[Name, about("First part of the endpoint's address.")] = "trinamo"
    component: Annotated[Name, about("Second part of the endpoint's address.")] = "backend"
    endpoint: Annotated[Name, about("Third part of the endpoint's address.")] = "generate"
    engine: Annotated[
        Literal["auto", "llamacpp", "exact", "echo", "mocker"],
        about("`auto`: llamacpp where its extra and model file are there, else exact."),
    ] = "auto"
    model_name: Annotated[
        Text | None, about("The name clients ask for; null: the engine's own.")
    ] = None
    model_path: Annotated[Text | None, about("A GGUF file; null: the fetched model.")] = None
    status_host: Annotated[
        Text, about("Address of the status port (`/health`, `/live`, `/metrics`).")
    ] = "127.0.0.1"
    status_port: Annotated[
        Port | None, about("Status port; 0: the system chooses; null: none.")
    ] = 0
    stop_grace_s: Annotated[Seconds, about("From a request's Stop until it becomes Kill.")] = 5.0
    requests_max: Annotated[
        Count, about("Requests at once; one more is refused as overloaded.")
    ] = 256
    running_max: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None,
        about("Sequences in one engine step; null: the engine's own."),
    ] = None
    waiting_max: Annotated[
        Count | None, about("Sequences that wait for a place; null: the engine's own.")
    ] = None
    step_tokens_max: Annotated[
        Tokens | None, about("Tokens in one engine step; null: the engine's own.")
    ] = None
    chunk_tokens_max: Annotated[
        Tokens | None,
        about("Prompt tokens of one sequence in one step; null: the engine's own."),
    ] = None
    context_tokens_max: Annotated[
        Annotated[int, Meta(ge=16, le=1 << 20, extra={"unit": "tokens"})] | None,
        about("Longest prompt plus answer; null: the engine's own."),
    ] = None
    kv_blocks: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 24, extra={"unit": "blocks"})] | None,
        about("Blocks of the KV pool; null: the engine's own."),
    ] = None
    kv_block_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1024, extra={"unit": "tokens"})],
        about("Tokens one KV block holds."),
    ] = 16
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)], about("Threads one engine step uses.")
    ] = 1
    cancelled_ttl_s: Annotated[
        Seconds, about("How long a cancel that overtook its request is remembered.")
    ] = 60.0
