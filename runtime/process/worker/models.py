"""The models of a worker: each at an endpoint, findable, and passed over while what is behind is away."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import trio

from ...config.worker import WorkerConfig, endpoint_of_model
from ...engines import GenerationEngine
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
    section = runtime.config.worker
    by_name = {each.model_name: each for each in section.by_model()}
    for engine in engines:
        own = section
        if len(engines) > 1 or section.models:
            # What is configured for its model, its endpoint above all.
            endpoint = endpoint_of_model(section.endpoint, engine.info.model)
            other = msgspec.structs.replace(section, endpoint=endpoint)
            own = by_name.get(engine.info.model, other)
        await _offer(own, runtime, engine, role, nursery, metadata)


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
    # Of a client's body frontends have bounded it, and nothing is decoded here.
    tokens, passes = info.context_tokens_max, info.passes_through
    endpoint = EndpointName(section.namespace, section.component, section.endpoint)
    instance = await runtime.serve_push(
        endpoint,
        forward_of(answering),
        request_type=GenerateRequest if passes else bounded_request_type(tokens),
        payload_bytes_max=_BODY_BYTES_MAX if passes else payload_bytes_max_for(tokens),
        metadata=about,
        engine=engine,
    )
    created = int(runtime.env.clock.wall())
    card = info.card(
        str(endpoint),
        created=created,
        aliases=section.model_aliases,
        sampling=msgspec.structs.asdict(section.sampling),
    )
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
