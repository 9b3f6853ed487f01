"""What one upstream is, whether it is well, and how busy: its models, its health, its metrics."""

from __future__ import annotations

import re
from typing import Any, Final

import attrs
import msgspec
import trio

from ...errors import ConnectError, RemoteProtocolError, TrinamoError
from .answers import WholeAnswer
from .connections import Connections, request_head
from .refusals import refusal_of

__all__ = ["ListedModel", "Load", "UpstreamView", "list_models"]

_ANSWER_BYTES_MAX: Final = 4 << 20
_TIMEOUT_S: Final = 5.0
_MODELS_MAX: Final = 1024
_SAMPLE = re.compile(rb"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{[^}\n]*\})?[ \t]+(\S+)", re.MULTILINE)
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


@attrs.frozen
class Load:
    """How busy an upstream says it is, whoever keeps it busy."""

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    """A fraction."""


def parse_load(page: bytes) -> Load | None:
    """The load on a page of metrics; None if it names none that we know."""
    found: dict[str, float] = {}
    for name, value in _SAMPLE.findall(page):
        gauge = _GAUGES.get(name)
        if gauge is None:
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        if not 0 <= number < 1e9:
            continue
        before = found.get(gauge, 0.0)
        found[gauge] = max(before, number) if gauge == "kv_used" else before + number
    if not found:
        return None
    return Load(
        running=int(found.get("running", 0)),
        waiting=int(found.get("waiting", 0)),
        kv_used=min(found.get("kv_used", 0.0), 1.0),
    )


class ListedModel(msgspec.Struct, frozen=True):
    """One entry of `/v1/models`: OpenAI's fields, vLLM's and llama.cpp's."""

    id: str
    max_model_len: Any = None
    meta: Any = None

    @property
    def context_tokens_max(self) -> int:
        """The model's context; 0 if it is not told."""
        told = self.max_model_len
        if told is None and isinstance(self.meta, dict):
            told = self.meta.get("n_ctx", self.meta.get("n_ctx_train"))
        return told if isinstance(told, int) and 0 < told < 1 << 31 else 0


class _Listed(msgspec.Struct, frozen=True):
    data: list[ListedModel]


_models_decoder = msgspec.json.Decoder(_Listed)


async def fetch(connections: Connections, path: str) -> tuple[int, bytes]:
    """The status and the body of a GET; raises `TransportError` or `RemoteProtocolError`."""
    head = request_head(connections.address, "GET", path, 0, {"accept": "*/*"})
    with trio.move_on_after(_TIMEOUT_S):
        connection, response, body = await connections.request(head, b"")
        whole = WholeAnswer(_ANSWER_BYTES_MAX)
        try:
            whole.feed(body)
            while not response.is_complete:
                data = await connection.receive()
                if not data:
                    response.end()
                whole.feed(response.feed(data))
        except BaseException:
            connection.close()
            raise
        connections.give(connection, response)
        return response.status, whole.body
    raise ConnectError(f"the upstream {connections.address.url} does not answer {path}")


async def list_models(connections: Connections) -> list[ListedModel]:
    """The models that the upstream lists. Raises `TrinamoError` if it does not."""
    address = connections.address
    status, body = await fetch(connections, f"{address.path}/models")
    if status != 200:
        refusal = refusal_of(status, {}, body)
        raise refusal or RemoteProtocolError(
            f"the upstream {address.url} has no {address.path}/models: is this its base URL?"
        )
    try:
        return _models_decoder.decode(body).data[:_MODELS_MAX]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(
            f"the upstream {address.url} does not list its models: {error}"
        ) from error


@attrs.define(eq=False)
class UpstreamView:
    """What is known of one upstream, looked at again and again by `look`."""

    connections: Connections
    failures_max: int
    is_healthy: bool = True
    why: str = ""
    """What went wrong at the last look."""
    load: Load | None = None
    """None if it does not tell."""
    models: list[ListedModel] = attrs.field(factory=list)
    changed: trio.Event = attrs.field(factory=trio.Event)
    """Of the next change of health or models."""
    _failures: int = 0
    _has_health: bool = True
    _has_metrics: bool = True

    async def look(self) -> None:
        """Ask once for health, models and load. Safe to cancel."""
        root = self.connections.address.root
        try:
            await self._check_health(root)
            models = await list_models(self.connections)
        except TrinamoError as error:
            self._failures += 1
            self.why = error.message
            if self.is_healthy and self._failures >= self.failures_max:
                self.is_healthy, self.load = False, None
                self._tell()
            return
        self._failures, self.why = 0, ""
        is_news = not self.is_healthy or models != self.models
        self.is_healthy, self.models = True, models
        if is_news:
            self._tell()
        await self._read_load(root)

    async def _check_health(self, root: str) -> None:
        if not self._has_health:
            return
        status, body = await fetch(self.connections, f"{root}/health")
        if status in (404, 405):
            # Ollama has none; that it lists its models must do.
            self._has_health = False
        elif status >= 300:
            raise refusal_of(status, {}, body) or RemoteProtocolError(
                f"the upstream answers {status} to /health"
            )

    async def _read_load(self, root: str) -> None:
        if not self._has_metrics:
            return
        try:
            status, page = await fetch(self.connections, f"{root}/metrics")
        except TrinamoError:
            self.load = None
            return
        self.load = parse_load(page) if status == 200 else None
        # Only who never had any is not asked again.
        self._has_metrics = status not in (404, 405, 501)

    def _tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()
