"""What one upstream is, whether it is well, and how busy: its models, its health, its metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs
import msgspec
import trio
from msgspec import Raw

from trinamo.runtime.errors import ConnectError, RemoteProtocolError, TrinamoError
from trinamo.runtime.logs.access import LOOK_AGENT
from trinamo.runtime.planes.upstreams import Load
from trinamo.runtime.protocol.openai.shaping import ABSENT, is_absent
from trinamo.runtime.protocol.undecodable import UNDECODABLE, decoding_fault

from .client import Connections, HttpReply
from .refusals import refusal_of

_ANSWER_BYTES_MAX: Final = 4 << 20
_METRICS_BYTES_MAX: Final = 1 << 20
"""A longer page tells nothing: it is read in one turn of the loop, between the tokens of others."""
_TIMEOUT_S: Final = 5.0
_ABSENT_S: Final = 60.0
"""Who has no health or metrics is asked for them again after this: another server may listen then."""
_MODELS_MAX: Final = 1024
_CHANGES_MAX: Final = 32
"""Models that come or go at one look, once an upstream has told its first: each is announced, and an
upstream that lists other names each time would keep the loop busy for all others."""
_NAME_CHARS_MAX: Final = 256
_COUNT_DIGITS_MAX: Final = 11
_HEADERS: Final = {"accept": "*/*", "user-agent": LOOK_AGENT}
_GAUGES: Final = {
    b"vllm:num_requests_running": "running",
    b"vllm:num_requests_waiting": "waiting",
    b"vllm:kv_cache_usage_perc": "kv_used",
    b"vllm:gpu_cache_usage_perc": "kv_used",
    b"sglang:num_running_reqs": "running",
    b"sglang:num_queue_reqs": "waiting",
    b"sglang:token_usage": "kv_used",
    b"llamacpp:requests_processing": "running",
    b"llamacpp:requests_deferred": "waiting",
    b"llamacpp:kv_cache_usage_ratio": "kv_used",
}
"""What servers call it: requests are added up, of fractions of the KV cache the largest counts."""


def parse_load(page: bytes) -> Load | None:
    """The load on a page of metrics; None if it names none that we know."""
    found: dict[str, float] = {}
    page = b"\n" + page
    for name, gauge in _GAUGES.items():
        for number in _samples(page, name):
            before = found.get(gauge, 0.0)
            found[gauge] = max(before, number) if gauge == "kv_used" else before + number
    if not found:
        return None
    return Load(
        running=int(found.get("running", 0)),
        waiting=int(found.get("waiting", 0)),
        kv_used=min(found.get("kv_used", 0.0), 1.0),
    )


def _samples(page: bytes, name: bytes) -> Iterator[float]:
    """The sensible values of one gauge, of lines that begin with `name`. Each line is read once."""
    start, at = b"\n" + name, -1
    while (at := page.find(start, at + 1)) >= 0:
        end = page.find(b"\n", at + 1)
        line = page[at + len(start) : end if end >= 0 else None]
        told = line.partition(b"}")[2] if line.startswith(b"{") else line
        if not told.startswith((b" ", b"\t")):
            continue
        try:
            number = float(told.split(None, 1)[0])
        except (ValueError, IndexError):
            continue
        if 0 <= number < 1e9:
            yield number


class _Meta(msgspec.Struct, frozen=True):
    """What llama.cpp's server tells of a model."""

    n_ctx: Raw = ABSENT
    n_ctx_train: Raw = ABSENT


class _ListedModel(msgspec.Struct, frozen=True):
    """One entry of `/v1/models`: OpenAI's fields, vLLM's and llama.cpp's."""

    id: str
    max_model_len: Raw = ABSENT
    meta: Raw = ABSENT

    @property
    def context_tokens_max(self) -> int:
        """The model's context; 0 if it is not told."""
        if not is_absent(self.max_model_len):
            return _count(self.max_model_len)
        try:
            meta = _meta_decoder.decode(self.meta)
        except UNDECODABLE:
            return 0
        return _count(meta.n_ctx if meta.n_ctx is not ABSENT else meta.n_ctx_train)


_meta_decoder = msgspec.json.Decoder(_Meta)


def _count(raw: Raw) -> int:
    """The number of tokens that stands there, or 0."""
    digits = bytes(memoryview(raw)[:_COUNT_DIGITS_MAX])
    return int(digits) if digits.isdigit() and int(digits) < 1 << 31 else 0


# Those beyond the last are read over: a list of megabytes does not become objects.
_Models: Any = msgspec.defstruct(
    "Models",
    [(f"model_{number}", _ListedModel | None, None) for number in range(_MODELS_MAX)],
    array_like=True,
    frozen=True,
)
# `data` is null where Ollama has no model.
_Listed: Any = msgspec.defstruct("Listed", [("data", _Models | None)], frozen=True)
_models_decoder = msgspec.json.Decoder(_Listed)


def parse_models(body: bytes) -> dict[str, int]:
    """The models of a list, and the tokens of their contexts; raises one of `UNDECODABLE`."""
    listed = _models_decoder.decode(body).data
    found = () if listed is None else filter(None, msgspec.structs.astuple(listed))
    return {
        each.id: each.context_tokens_max for each in found if 0 < len(each.id) <= _NAME_CHARS_MAX
    }


async def fetch(
    connections: Connections, path: str, bytes_max: int = _ANSWER_BYTES_MAX
) -> tuple[int, bytes]:
    """The status and the body of a GET; raises `TransportError`, `RemoteProtocolError` or `OverloadedError`."""
    with trio.move_on_after(_TIMEOUT_S):
        connection, response, begun = await connections.request("GET", path, b"", _HEADERS)
        reply = HttpReply(response.status, connection, response, begun)
        try:
            body = await reply.body(bytes_max=bytes_max)
        except BaseException:
            connection.close()
            raise
        connections.give(connection, response)
        return reply.status, body
    raise ConnectError(f"the upstream {connections.address.url} does not answer {path}")


async def list_models(connections: Connections) -> dict[str, int]:
    """The models that the upstream lists, and the tokens of their contexts. Raises `TrinamoError` if it does not."""
    address = connections.address
    status, body = await fetch(connections, f"{address.path}/models")
    if status != 200:
        refusal = refusal_of(status, {}, body)
        raise refusal or RemoteProtocolError(
            f"the upstream {address.url} has no {address.path}/models: is this its base URL?"
        )
    try:
        return parse_models(body)
    except UNDECODABLE as error:
        raise RemoteProtocolError(
            f"the upstream {address.url} does not list its models: {decoding_fault(error)}"
        ) from error


def settled(before: Mapping[str, int], listed: Mapping[str, int]) -> dict[str, int]:
    """The models `listed`, but for those that differ from `before` beyond `_CHANGES_MAX`."""
    changes = [name for name in before if name not in listed]
    changes += [name for name in listed if name not in before]
    if not before or len(changes) <= _CHANGES_MAX:
        return dict(listed)
    changed = set(changes[:_CHANGES_MAX])
    kept = {name: listed.get(name, count) for name, count in before.items() if name not in changed}
    return kept | {name: count for name, count in listed.items() if name in changed}


@attrs.define(eq=False)
class UpstreamView:
    """What is known of one upstream, looked at again and again by `look`."""

    connections: Connections
    failures_max: int
    is_healthy: bool = True
    looked: trio.Event = attrs.field(factory=trio.Event)
    """That it was looked at once."""
    has_told: bool = False
    """Whether it has ever said what it serves."""
    why: str = ""
    """What went wrong at the last look."""
    load: Load | None = None
    """None if it does not tell."""
    models: dict[str, int] = attrs.field(factory=dict)
    changed: trio.Event = attrs.field(factory=trio.Event)
    """Of the next change of health or models."""
    _failures: int = 0
    _health_from: float = -math.inf
    _metrics_from: float = -math.inf
    """From when on it is asked for these: whoever had none is not asked at every look."""

    async def look(self) -> None:
        """Ask once for health, models and load. Safe to cancel."""
        root = self.connections.address.root
        try:
            if trio.current_time() >= self._health_from:
                status, body = await fetch(self.connections, f"{root}/health")
                if status in (404, 405):
                    # Ollama has none; that it lists its models must do.
                    self._health_from = trio.current_time() + _ABSENT_S
                elif status >= 300:
                    raise refusal_of(status, {}, body) or RemoteProtocolError(
                        f"the upstream answers {status} to /health"
                    )
            models = settled(self.models, await list_models(self.connections))
        except TrinamoError as error:
            self._failures += 1
            self.why = error.message
            if self.is_healthy and self._failures >= self.failures_max:
                self.is_healthy, self.load = False, None
                self._tell()
            self.looked.set()
            return
        self._failures, self.why = 0, ""
        is_news = not self.is_healthy or models != self.models
        self.is_healthy, self.models, self.has_told = True, models, True
        if is_news:
            self._tell()
        self.looked.set()
        if trio.current_time() < self._metrics_from:
            return
        try:
            status, page = await fetch(self.connections, f"{root}/metrics", _METRICS_BYTES_MAX)
        except TrinamoError:
            self.load = None
            return
        self.load = parse_load(page) if status == 200 else None
        if status in (404, 405, 501):
            self._metrics_from = trio.current_time() + _ABSENT_S

    def _tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()
