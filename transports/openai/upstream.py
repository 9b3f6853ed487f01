"""One upstream: the client's body out, its answer back, unread; watched while it is open."""

from __future__ import annotations

import logging
import select
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import trio

from trinamo.runtime.config.upstream import UpstreamConfig
from trinamo.runtime.context import Context
from trinamo.runtime.errors import RequestError
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.protocol.openai.generate import GenerateRequest, PassedRequest
from trinamo.runtime.protocol.openai.passing import (
    Renaming,
    decode_passed,
    harmless_id,
    last_chunk,
    with_assistant_prefix,
    with_model,
)

from .address import Address, find_address
from .answers import StreamedAnswer, WholeAnswer
from .client import Connections
from .exchange import Calls, Readers, UpstreamAnswer
from .watch import UpstreamView

_log = logging.getLogger("trinamo.upstream")
EVENT_BYTES_MAX: Final = 1 << 20
"""Of an answer that is streamed; one with a longer event is given up."""
_CHAT: Final = "/v1/chat/completions"
_STREAMED: Final = (_CHAT, "/v1/completions", "/v1/responses", "/v1/messages")
"""Of all others no server streams, whatever the body says."""
_PATHS: Final = (
    *_STREAMED,
    *("/v1/embeddings", "/v1/messages/count_tokens", "/tokenize", "/detokenize"),
)
_PREFIXES: Final[dict[str, dict[str, Any]]] = {
    "vllm": {"continue_final_message": True, "add_generation_prompt": False},
    "llamacpp": {},
}
"""How a server is told to go on with the last turn, beside the turn itself."""


class Upstream:
    """One server, of which `open` asks; made by `open_upstream`, which watches it."""

    def __init__(self, address: Address, section: UpstreamConfig, nursery: trio.Nursery) -> None:
        self.address = address
        self.url, self.place = address.url, f"{address.host}:{address.port}"
        self.section = section
        self._connections = Connections(address, section.connect_timeout_s, nursery)
        looks = Connections(address, section.connect_timeout_s, nursery)
        self.view = UpstreamView(looks, section.health_failures_max)
        """Health, load and models."""
        self._calls = Calls(section)
        self._readers = Readers() if hasattr(select, "epoll") else None

    async def open(self, request: GenerateRequest, model: str, context: Context) -> UpstreamAnswer:
        """Send the request's body, for the upstream's `model`.

        Returns once it begins to answer; if it does not stream, once the answer is whole: as long as
        nothing is handed on, another upstream may do it. The answer is to be forwarded, and closed.
        Raises `RequestError` for a body that cannot be sent, `TransportError`, `OverloadedError`,
        `UnavailableError` or `RemoteProtocolError` where another upstream may do it. Stopped, it
        returns an answer that is cancelled; safe to cancel.
        """
        if request.path not in _PATHS:
            raise RequestError("this model takes requests of OpenAI's API alone, with their bodies")
        asked = request.passed or decode_passed(request.body)
        body = self._body(request, asked.model, model)
        form = self._form(request, asked, model)
        answer = UpstreamAnswer(
            self._connections, self._calls, self._readers, self.section, context, form
        )
        if body is None:
            answer.take_end(last_chunk(request.opening))
            return answer
        path = self.address.path + request.path.removeprefix("/v1")
        if not request.path.startswith("/v1"):
            path = self.address.path.removesuffix("/v1") + request.path
        told = {"accept-encoding": "identity", "x-request-id": harmless_id(context.id)}
        if context.traceparent:
            told["traceparent"] = context.traceparent
        with self._calls.call(context) as call:
            try:
                answer.take(
                    *await self._connections.request("POST", path, body, told, heard=call.heard)
                )
                call.is_begun, call.brought_at = True, call.heard_at
                await answer.begin(call)
            except BaseException:
                answer.close()
                raise
            return answer
        await call.left()
        return answer

    def _body(self, request: GenerateRequest, asked: str | None, model: str) -> bytes | None:
        """What the upstream gets; None if the client has all tokens that it allows."""
        body: bytes | None = request.body
        if request.delivered_text:
            extra = _PREFIXES[self.section.resume]
            body = with_assistant_prefix(
                request.body, request.delivered_text, request.delivered_tokens, extra
            )
        return body if body is None or asked == model else with_model(body, model)

    def _form(
        self, request: GenerateRequest, asked: PassedRequest, model: str
    ) -> StreamedAnswer | WholeAnswer:
        renaming = Renaming(model, asked.model) if asked.model not in (None, model) else None
        if not asked.stream or request.path not in _STREAMED:
            return WholeAnswer(self.section.answer_bytes_max, renaming)
        choices = asked.choices if request.path == _CHAT else 0
        opening, delivered = request.opening, request.delivered_tokens
        return StreamedAnswer(
            EVENT_BYTES_MAX, renaming, choices=choices, opening=opening, delivered=delivered
        )

    async def run(self) -> None:
        """Look after health, stalls and idle connections until cancelled; then close these."""
        try:
            async with open_nursery() as nursery:
                nursery.start_soon(self._calls.watch)
                if self._readers is not None:
                    nursery.start_soon(self._readers.run)
                while True:
                    await self.view.look()
                    self._connections.close_old()
                    await trio.sleep(self.section.health_interval_s)
        finally:
            self._connections.close()
            self.view.connections.close()


@asynccontextmanager
async def open_upstream(url: str, section: UpstreamConfig) -> AsyncIterator[Upstream]:
    """The upstream at `url`, watched while the context is open. Raises `ConfigError`."""
    address = find_address(url, section)
    if address.shows_key:
        _log.warning("the key goes to %s unencrypted: whoever is between can read it", address.url)
    async with open_nursery() as nursery:
        upstream = Upstream(address, section, nursery)
        nursery.start_soon(upstream.run)
        yield upstream
        nursery.cancel_scope.cancel()
