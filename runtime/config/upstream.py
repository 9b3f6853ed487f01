"""The configuration of upstreams: OpenAI-compatible servers that workers or frontends stand before."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .keys import Bytes, FrameBytes, Seconds, Section, Text, about


class UpstreamConfig(Section, frozen=True, kw_only=True):
    """What is asked by `worker.engine: openai`, and by frontends with `http.upstreams`."""

    url: Annotated[
        Text | None,
        about(
            "Of a worker's upstream, such as `http://host:8000/v1`; `trinamo worker --upstream`."
        ),
    ] = None
    key_env: Annotated[
        Text | None,
        about("The environment variable that holds the key to send as `Authorization: Bearer`."),
    ] = None
    key_file: Annotated[Text | None, about("Or the file that does.")] = None
    model: Annotated[
        Text | None,
        about(
            "What the upstream calls the model of a worker, where that is not"
            " `worker.model_name`; null: the one that it lists."
        ),
    ] = None
    ca_file: Annotated[
        Text | None, about("Who signs certificates of https upstreams; null: the system's.")
    ] = None
    connect_timeout_s: Annotated[Seconds, about("For a connection, TLS included.")] = 5.0
    first_byte_timeout_s: Annotated[
        Seconds,
        about(
            "From a request until the head of its answer: prompts are computed meanwhile. Also how"
            " long comments alone may keep an answer alive, and how long one that is not streamed may"
            " take behind its head."
        ),
    ] = 600.0
    stall_timeout_s: Annotated[
        Seconds, about("An answer that brings nothing this long, no comment either, is given up.")
    ] = 120.0
    answer_bytes_max: Annotated[
        FrameBytes, about("A longer answer that is not streamed is given up.")
    ] = 64 << 20
    answers_bytes_max: Annotated[
        Bytes, about("All such answers of a process together; one that finds no room is a 503.")
    ] = 256 << 20
    health_interval_s: Annotated[
        Seconds, about("Between two looks at an upstream's health and load.")
    ] = 2.0
    health_failures_max: Annotated[
        Annotated[int, Meta(ge=1, le=100)],
        about("Looks in a row that fail before an upstream is taken for gone."),
    ] = 2
    start_timeout_s: Annotated[
        Seconds, about("How long a worker waits at its start for the upstream to list its models.")
    ] = 60.0
    resume: Annotated[
        Literal["off", "vllm", "llamacpp"],
        about(
            "Whether a broken chat goes on at another upstream behind the text that the client has:"
            " `vllm` by `continue_final_message`, `llamacpp` by an assistant turn at the end. Only"
            " where all upstreams run that server and the same model."
        ),
    ] = "off"

    def __post_init__(self) -> None:
        if self.key_env is not None and self.key_file is not None:
            raise ValueError("upstream: key_env and key_file are both set; one is enough")
