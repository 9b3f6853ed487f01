"""What one worker process is called, what it runs, and how much of it; whom it asks, and what it lends."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from .keys import Bytes, Count, Name, Port, Seconds, Section, Text, Tokens, about
from .models import check_engine, is_own_engine, parse_model
from .upstream import UpstreamConfig

_NAME_CHARACTERS_MAX: Final = 63
ModelName = Annotated[str, Meta(min_length=1, max_length=256)]


_Penalty = Annotated[float, Meta(ge=-2, le=2)]


class SamplingConfig(Section, frozen=True, kw_only=True):
    """What a model's requests have where they leave it out; null: what its file or engine says."""

    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None, about("0: the likeliest token, always.")
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        about("The likeliest tokens that have so much of all chance together."),
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=0, le=2**31 - 1)] | None,
        about("So many of the likeliest tokens; 0: all."),
    ] = None
    min_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        about("Tokens with at least so much of the chance that the likeliest has."),
    ] = None
    presence_penalty: Annotated[_Penalty | None, about("For what the answer has said.")] = None
    frequency_penalty: Annotated[_Penalty | None, about("For each time that it has.")] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(gt=0, le=2)] | None,
        about("Divides what prompt or answer have said; 1: none."),
    ] = None
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=2**31 - 1, extra={"unit": "tokens"})] | None,
        about("Tokens of an answer to a chat or to `/v1/responses`."),
    ] = None


class WorkerConfig(Section, frozen=True, kw_only=True):
    """One worker process: what it is called and what it runs."""

    namespace: Annotated[Name, about("First part of the endpoint's address.")] = "trinamo"
    component: Annotated[Name, about("Second part of the endpoint's address.")] = "backend"
    endpoint: Annotated[Name, about("Third part of the endpoint's address.")] = "generate"
    role: Annotated[
        Literal["aggregated", "prefill", "decode"],
        about(
            "`decode` answers requests and has long prompts computed by workers whose role is"
            " `prefill`; `aggregated` does all by itself."
        ),
    ] = "aggregated"
    engine: Annotated[
        Text,
        about(
            "`auto` (llamacpp where its extra and model file are there, else exact), `llamacpp`,"
            " `exact`, `echo`, `mocker`, or `openai` (the server at `upstream.url`); or an engine of"
            " your own, as `module:attribute` or"
            " `path/to/file.py:attribute`."
        ),
    ] = "auto"
    engine_args: Annotated[
        Annotated[dict[str, str], Meta(max_length=64)],
        about("What an engine of your own is opened with, by parameter; as text `name=value,…`."),
    ] = {}
    model_name: Annotated[
        Text | None, about("The name clients ask for; null: the engine's own.")
    ] = None
    model_path: Annotated[Text | None, about("A GGUF file; null: the fetched model.")] = None
    model_sha256: Annotated[
        Annotated[str, Meta(pattern="^[0-9a-f]{64}$")] | None,
        about(
            "Of the file, where it is taken from a peer (`weights`); null: that of the fetched model,"
            " or what the cluster's members hold under `model_name`."
        ),
    ] = None
    model_aliases: Annotated[
        Annotated[tuple[ModelName, ...], Meta(max_length=32)],
        about("Other names that clients may ask for; answers carry the name that was asked for."),
    ] = ()
    models: Annotated[
        Annotated[tuple[Text, ...], Meta(max_length=32)],
        about(
            "Several models in one process, `NAME=ENGINE` each, with `;alias=…`, `;path=…`,"
            " `;sha256=…`, `;endpoint=…` and `;arg=NAME=VALUE` behind it as needed; without"
            " `endpoint` each has one that is called after it. `engine`, `engine_args`, `model_name`,"
            " `model_path` and `model_aliases` are for one model."
        ),
    ] = ()
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
        about("Sequences in one engine step, of `llamacpp` at most 256; null: the engine's own."),
    ] = None
    waiting_max: Annotated[
        Count | None, about("Sequences that wait for a place; null: the engine's own.")
    ] = None
    waiting_tokens_max: Annotated[
        Tokens | None,
        about(
            "While more prompt tokens than this wait to be computed, new requests are refused as"
            " overloaded, and tried elsewhere; null: no bound."
        ),
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
    kv_layout: Annotated[
        Literal["block_first", "layer_first", "per_layer"],
        about(
            "How `exact` and `llamacpp` lay KV blocks out: whole, by layer in one buffer, or in a "
            "buffer a layer. Peers must have the same."
        ),
    ] = "block_first"
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | Literal["auto"],
        about(
            "Threads one engine step uses. `auto`: of `llamacpp`, the cores that are free at the"
            " start, which the workers of one `trinamo up` share; else 1."
        ),
    ] = "auto"
    hang_timeout_s: Annotated[
        Seconds | None,
        about(
            "Who starts several processes (`trinamo up`, `frontend --processes`) ends one that has"
            " not answered this long, and starts it again; null: never."
        ),
    ] = 30.0
    cancelled_ttl_s: Annotated[
        Seconds,
        about(
            "How long a cancel that overtook its request is remembered; only requests over NATS can be"
            " overtaken (`data_plane.requests: nats`)."
        ),
    ] = 60.0
    closed_objects: Annotated[
        bool,
        about(
            "An object of a JSON schema that names `properties` has no others, unless it says"
            " `additionalProperties`; false: it may, as JSON Schema has it."
        ),
    ] = True
    embeddings: Annotated[
        bool,
        about(
            "Have `llamacpp` make embeddings with a model that is not made for it: the mean of its"
            " last layer. One that is made for it does anyway."
        ),
    ] = False
    sampling: SamplingConfig = SamplingConfig()
    upstream: UpstreamConfig = UpstreamConfig()

    def __post_init__(self) -> None:
        """A worker has one model by its own keys, or several by lines of `models`."""
        check_engine(self.engine)
        if self.engine_args and not is_own_engine(self.engine):
            raise ValueError(
                f"engine_args is for an engine of your own, and engine is {self.engine}"
            )
        sections = self.by_model()
        for what, said in (
            ("name", [each.model_name for each in sections]),
            ("endpoint", [each.endpoint for each in sections]),
        ):
            if len(set(said)) < len(said):
                raise ValueError(f"models: two have one {what}: {', '.join(map(str, said))}")
        if self.models and (self.model_name or self.model_path or self.model_aliases):
            raise ValueError(
                "models is for several models; model_name, model_path, model_aliases for one"
            )

    def by_model(self) -> tuple[WorkerConfig, ...]:
        """This section for each of its models, as of a worker that serves that one alone.

        All other keys, such as the bounds of the engine, hold for each model. Raises `ValueError`.
        """
        if not self.models:
            return (self,)
        return tuple(self._of_model(line) for line in self.models)

    def _of_model(self, line: str) -> WorkerConfig:
        said = parse_model(line)
        changes: dict[str, Any] = {
            "models": (),
            "model_name": said.name,
            "model_sha256": said.sha256,
            "engine": said.engine,
            "engine_args": said.engine_args,
            "model_path": said.path,
            "model_aliases": said.aliases,
            "endpoint": said.endpoint or endpoint_of_model(self.endpoint, said.name),
        }
        return msgspec.convert(
            {**msgspec.structs.asdict(self), **changes}, WorkerConfig, from_attributes=True
        )


def endpoint_of_model(endpoint: str, model: str) -> str:
    """What the endpoint of one of several models is called: the same in every process."""
    slug = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-") or "model"
    return f"{endpoint}-{slug}"[:_NAME_CHARACTERS_MAX]


class DisaggregationConfig(Section, frozen=True, kw_only=True):
    """Prefill and decode workers (`worker.role`); see `docs/disaggregation.md`."""

    mode: Annotated[
        Literal["decode_first", "prefill_first"],
        about(
            "As decode workers are told. `decode_first`: they have blocks and put a job into the"
            " queue, and a prefill worker writes into these while it computes. `prefill_first`: they"
            " ask a prefill worker, and read its blocks when it has computed all."
        ),
    ] = "prefill_first"
    prefill_tokens_local_max: Annotated[
        Annotated[int, Meta(ge=0, le=1 << 20, extra={"unit": "tokens"})],
        about("Prompts with no more than this to compute are computed by the decode worker."),
    ] = 1000
    queue_depth_max: Annotated[
        Annotated[int, Meta(ge=1, le=10_000)],
        about("While so many prompts wait for a prefill worker, decode workers compute theirs."),
    ] = 16
    queue_timeout_s: Annotated[
        Seconds,
        about("How long a prompt waits for a prefill worker to begin with it."),
    ] = 2.0
    prefill_timeout_s: Annotated[
        Seconds,
        about("How long a prefill worker may take until the blocks are at the decode worker."),
    ] = 30.0
    pool_share_max: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        about(
            "The part of a decode worker's KV blocks that may be lent to prefill workers, or in"
            " quarantine because one hangs; prompts beyond it are computed by the decode worker."
        ),
    ] = 0.5
    jobs_max: Annotated[
        Count, about("Jobs of the queue that one prefill worker works on at a time.")
    ] = 4


class WeightsConfig(Section, frozen=True, kw_only=True):
    """A worker without its model's file takes it from a peer; see `docs/weights.md`."""

    enabled: Annotated[
        bool, about("Offer our model file to peers, and take theirs where ours is missing.")
    ] = True
    bytes_per_second_max: Annotated[Bytes, about("Lent to all peers together, beside serving.")] = (
        256 << 20
    )
    peers_max: Annotated[
        Annotated[int, Meta(ge=1, le=64)],
        about("Peers that take from us at once; the next one is refused, and tries another."),
    ] = 4
    chunk_bytes: Annotated[
        Annotated[int, Meta(ge=4096, le=1 << 26, extra={"unit": "bytes"})],
        about(
            "Read, sent and checked at once. A holder registers twice as much memory for each of"
            " `peers_max`, and touches it when it is asked."
        ),
    ] = 4 << 20
    file_bytes_max: Annotated[Bytes, about("A larger file is not taken.")] = 1 << 38
    patience_s: Annotated[
        Seconds, about("How long a worker without a file looks for a peer that lends it.")
    ] = 60.0
    stall_timeout_s: Annotated[
        Seconds,
        about(
            "A holder that brings no chunk for so long is left for another. Longer than"
            " `chunk_bytes` of each of `peers_max` take at `bytes_per_second_max`."
        ),
    ] = 30.0
    port: Annotated[Port, about("Port of a holder for these reads; 0: the system chooses.")] = 0
