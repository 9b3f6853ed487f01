"""The models of a worker: each at an endpoint, findable, and passed over while what is behind is away."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import trio

from ...config.worker import WorkerConfig, endpoint_of_model
from ...engines import EngineInfo, GenerationEngine
from ...engines.generation import StandsBefore, forward_of
from ...kv.regions import HoldsKv, KvCache
from ...protocol.discovery.instances import EndpointName, Instance
from ...protocol.discovery.model_cards import encode_card, model_key
from ...protocol.openai.generate import (
    GenerateRequest,
    bounded_request_type,
    payload_bytes_max_for,
)
from ..runtime import Runtime
from .disaggregated import DecodeRole, PrefillRole

_log = logging.getLogger("trinamo.runtime")
_BODY_BYTES_MAX: Final = 1 << 28


def movable_kv(engines: Sequence[GenerationEngine]) -> KvCache | None:
    """The KV memory that peers may move blocks to and from: a process describes one."""
    held = [each for each in engines if isinstance(each, HoldsKv) and each.kv is not None]
    for other in held[1:]:
        _log.warning(
            "KV blocks of %s are not moved: a process offers those of one model, here %s",
            *(other.info.model, held[0].info.model),
        )
    return held[0].kv if held else None


async def offer_models(
    nursery: trio.Nursery,
    runtime: Runtime,
    engines: Sequence[GenerationEngine],
    role: DecodeRole | PrefillRole | None,
    metadata: Mapping[str, str],
) -> None:
    """Serve each model and publish its card; returns once all can be found."""
    for section, engine in _sections(runtime.config.worker, engines):
        await _offer(section, runtime, engine, role, nursery, metadata)


def _sections(
    section: WorkerConfig, engines: Sequence[GenerationEngine]
) -> list[tuple[WorkerConfig, GenerationEngine]]:
    """Each engine with what is configured for its model, its endpoint above all."""
    if len(engines) == 1 and not section.models:
        return [(section, engines[0])]
    by_name = {each.model_name: each for each in section.by_model()}

    def of(model: str) -> WorkerConfig:
        endpoint = endpoint_of_model(section.endpoint, model)
        return by_name.get(model) or msgspec.structs.replace(section, endpoint=endpoint)

    return [(of(each.info.model), each) for each in engines]


async def _offer(
    section: WorkerConfig,
    runtime: Runtime,
    engine: GenerationEngine,
    role: DecodeRole | PrefillRole | None,
    nursery: trio.Nursery,
    metadata: Mapping[str, str],
) -> None:
    """Register the endpoint of one model, and publish its card, unless others answer for it."""
    info = engine.info
    about = {"engine": info.engine, "model": info.model, "role": section.role, **metadata}
    about["for"] = "prefill" if isinstance(role, PrefillRole) else "generate"
    if isinstance(role, PrefillRole):
        await role.offer(nursery, about)
        return
    answering = engine if role is None else await nursery.start(role.run, about)
    endpoint = EndpointName(section.namespace, section.component, section.endpoint)
    instance = await runtime.serve_push(
        endpoint,
        forward_of(answering),
        **_bounds_of_request(info),
        metadata=about,
        engine=engine,
    )
    created = int(runtime.env.clock.wall())
    card = info.card(str(endpoint), created=created, aliases=section.model_aliases)
    await runtime.publish(model_key(card.name, instance.id), encode_card(card))
    standing: object = engine
    if isinstance(standing, StandsBefore):
        nursery.start_soon(_follow_health, runtime, instance, standing)


async def _follow_health(runtime: Runtime, instance: Instance, engine: StandsBefore) -> None:
    """While the server behind is away, let nobody choose this worker."""
    is_healthy = True
    while True:
        is_healthy = await engine.wait_health(seen=is_healthy)
        text = "the upstream of %s is well" if is_healthy else "the upstream of %s is away"
        _log.log(logging.INFO if is_healthy else logging.WARNING, text, instance.endpoint)
        await runtime.set_draining(instance, is_draining=not is_healthy)


def _bounds_of_request(info: EngineInfo) -> dict[str, Any]:
    if info.passes_through:
        # A client's body: frontends have bounded it, and nothing of it is decoded here.
        return {"request_type": GenerateRequest, "payload_bytes_max": _BODY_BYTES_MAX}
    return {
        "request_type": bounded_request_type(info.context_tokens_max),
        "payload_bytes_max": payload_bytes_max_for(info.context_tokens_max),
    }
