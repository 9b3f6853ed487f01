"""One model of an upstream as an engine, for `trinamo worker --engine openai`."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import attrs
import trio

from trinamo.runtime.config.upstream import UpstreamConfig
from trinamo.runtime.context import Context
from trinamo.runtime.engines.generation import EngineInfo, EngineStatistics
from trinamo.runtime.errors import (
    ConfigError,
    ConnectError,
    LocalProtocolError,
    OverloadedError,
    TrinamoError,
)
from trinamo.runtime.protocol.openai.generate import Delta, GenerateRequest
from trinamo.runtime.sinks import Sink

from .upstream import Upstream, open_upstream
from .watch import list_models

_log = logging.getLogger("trinamo.upstream")
_START_PAUSE_S: Final = 0.5


@attrs.define(eq=False)
class UpstreamEngine:
    """One model of one upstream, for a worker; made by `open_upstream_engine`."""

    upstream: Upstream
    info: EngineInfo
    _theirs: str
    _running_max: int
    _running: int = 0
    _cancellations: int = 0
    _failures: int = 0

    def statistics(self) -> EngineStatistics:
        load = self.upstream.view.load
        return EngineStatistics(
            running=self._running,
            waiting=0 if load is None else load.waiting,
            cancellations=self._cancellations,
            failures=self._failures,
        )

    async def forward(self, request: GenerateRequest, context: Context, sink: Sink[Delta]) -> None:
        """Hand the upstream's answer to `sink`; see `Upstream.open`."""
        if self._running >= self._running_max:
            raise OverloadedError(
                f"worker.running_max {self._running_max} requests are under way at the upstream",
                bound="running_max",
                value=self._running_max,
            )
        self._running += 1
        try:
            answer = await self.upstream.open(request, self._theirs, context)
            try:
                await answer.forward(sink)
            finally:
                answer.close()
        except trio.Cancelled:
            self._cancellations += 1
            raise
        except TrinamoError:
            self._failures += 1
            raise
        finally:
            self._running -= 1

    @property
    def is_healthy(self) -> bool:
        """Whether the upstream answers, and has the model: it may have been restarted with another."""
        view = self.upstream.view
        return view.is_healthy and (not view.models or self._theirs in view.models)

    async def wait_health(self, *, seen: bool) -> bool:
        """Return the health once it is not `seen`. Safe to cancel."""
        while self.is_healthy is seen:
            await self.upstream.view.changed.wait()
        return self.is_healthy

    def load(self) -> tuple[int, float]:
        """What the upstream tells of its load; without that, only our own requests."""
        load = self.upstream.view.load
        if load is None:
            return self._running, 0.0
        return max(self._running, load.running + load.waiting), load.kv_used

    def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[Delta, None]:
        """Raise: answers of an upstream are pushed; see `forward_of`."""
        del request, context
        raise LocalProtocolError("an upstream's answers are not pulled: ask by `forward`")


@asynccontextmanager
async def open_upstream_engine(
    section: UpstreamConfig,
    *,
    model: str | None = None,
    context_tokens_max: int | None = None,
    running_max: int = 4096,
) -> AsyncIterator[UpstreamEngine]:
    """The model that clients call `model`, or the one that the upstream lists.

    Waits for the upstream to list its models. Raises `ConfigError` if it lists others than is asked
    for, and `ConnectError` after `start_timeout_s` without a list.
    """
    assert section.url is not None, "whoever chose this engine has looked"
    async with open_upstream(section.url, section) as upstream:
        listed = await _wait_models(upstream, section)
        theirs = _choose(listed, section.model, model)
        info = EngineInfo(
            engine="openai",
            model=model or theirs,
            context_tokens_max=context_tokens_max or listed[theirs],
            can_resume=section.resume != "off",
            passes_through=True,
        )
        yield UpstreamEngine(upstream, info, theirs, running_max)


async def _wait_models(upstream: Upstream, section: UpstreamConfig) -> dict[str, int]:
    last: TrinamoError | None = None
    with trio.move_on_after(section.start_timeout_s):
        while True:
            try:
                found = await list_models(upstream.view.connections)
            except TrinamoError as error:
                if last is None:
                    _log.warning("waiting for the upstream: %s", error)
                last = error
            else:
                if found:
                    return found
                last = ConnectError(f"the upstream {upstream.address.url} lists no model")
            await trio.sleep(_START_PAUSE_S)
    raise ConnectError(
        f"no model after {section.start_timeout_s:g} s: {last or 'the upstream does not answer'}"
    )


def _choose(listed: dict[str, int], theirs: str | None, ours: str | None) -> str:
    wanted = theirs or ours
    names = ", ".join(list(listed)[:8])
    if wanted is None or (theirs is None and wanted not in listed):
        if len(listed) == 1:
            return next(iter(listed))
        raise ConfigError(
            f"the upstream lists several models ({names}); choose one with --model-name, or with"
            " --set worker.upstream.model=… if clients call it otherwise"
        )
    if wanted not in listed:
        raise ConfigError(f"the upstream does not list the model {wanted!r}; it lists {names}")
    return wanted
