"""The upstreams of a frontend: watched, and offered as instances and models while they are well."""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Mapping
from typing import Final

import attrs
import msgspec
import trio

from ...config.config import Config
from ...config.worker import endpoint_of_model
from ...events.load import LoadReport
from ...nurseries import open_nursery
from ...planes.upstreams import Upstream
from ...protocol.discovery.instances import EndpointName, Instance, encode_instance
from ...protocol.discovery.model_cards import encode_card, model_key
from ...protocol.openai.generate import ModelCard
from ...view.overview import AWAY, InstanceView, Overview, overview
from ..runtime import Runtime

_log = logging.getLogger("trinamo.upstream")
_NAMESPACE: Final = "upstreams"
_LOOK_TIMEOUT_S: Final = 5.0
"""So long the start waits for all of them; those that take longer come later."""


@attrs.frozen
class _Watched:
    """One upstream, as discovery knows it."""

    upstream: Upstream
    instance_id: str
    offered: dict[str, tuple[int, bool]] = attrs.field(factory=dict, eq=False)
    """Models that it lists, with the tokens of their contexts, 0 where it tells none, and whether
    it is well: else it finishes what it has, and is given nothing new."""

    is_offered: trio.Event = attrs.field(factory=trio.Event, eq=False)
    """What its first look has found."""

    def instance(self, model: str) -> Instance:
        return Instance(
            endpoint=str(_endpoint_of(model)),
            id=self.instance_id,
            transports={"http": self.upstream.place},
            draining=not self.upstream.view.is_healthy,
            metadata={"engine": "openai", "model": model, "upstream": self.upstream.url},
        )


class DirectUpstreams:
    """The upstreams of `http.upstreams`: watched, and put where the clients of the process ask."""

    def __init__(self, config: Config, runtime: Runtime) -> None:
        self._config, self._runtime = config, runtime
        self._section = config.worker.upstream
        self._watched: dict[str, _Watched] = {}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch all of them until cancelled. Raises `ConfigError` for a URL that is none."""
        async with open_nursery() as nursery:
            for url in self._config.http.upstreams:
                await nursery.start(self._watch, url)
            nursery.start_soon(self._tell_loads)
            # Requests find the models of those who answer from the first moment.
            with trio.move_on_after(_LOOK_TIMEOUT_S):
                for watched in self._watched.values():
                    await watched.is_offered.wait()
            task_status.started()

    async def _watch(self, url: str, *, task_status: trio.TaskStatus[None]) -> None:
        """Offer what the upstream lists, for new requests while it is well."""
        async with self._runtime.http.open_upstream(url, self._section) as upstream:
            name = hashlib.blake2b(upstream.url.encode(), digest_size=8).hexdigest()
            self._watched[name] = watched = _Watched(upstream, name)
            self._runtime.data.upstreams[name] = upstream
            # Others than the log know it by its id alone.
            _log.info("the upstream %s is instance %s", upstream.url, name)
            task_status.started()
            view = upstream.view
            await view.looked.wait()
            while True:
                changed = view.changed
                if not view.is_healthy:
                    _log.warning("the upstream %s is away: %s", upstream.url, view.why)
                await self._offer(watched, view.models)
                watched.is_offered.set()
                await changed.wait()

    async def _offer(self, watched: _Watched, models: Mapping[str, int]) -> None:
        control, is_well = self._runtime.control, watched.upstream.view.is_healthy
        for model, context_tokens_max in models.items():
            told = watched.offered.get(model)
            watched.offered[model] = context_tokens_max, is_well
            if told == watched.offered[model]:
                continue
            instance = watched.instance(model)
            card = ModelCard(
                name=model,
                endpoint=instance.endpoint,
                engine="openai",
                context_tokens_max=context_tokens_max,
                created=int(self._runtime.env.clock.wall()),
                can_resume=self._section.resume != "off",
                passes_through=True,
            )
            if told is None:
                _log.info("the upstream %s serves %s", watched.upstream.url, model)
            await control.put(instance.key, encode_instance(instance))
            await control.put(model_key(model, instance.id), encode_card(card))
        for model in watched.offered.keys() - models.keys():
            del watched.offered[model]
            await control.delete(model_key(model, watched.instance_id))
            await control.delete(watched.instance(model).key)

    def knows_all(self) -> bool:
        """Whether each of them has said by now what it serves."""
        return all(each.upstream.view.has_told for each in self._watched.values())

    async def _tell_loads(self) -> None:
        """What upstreams say of their load, to the routers that choose among them."""
        while True:
            for watched in self._watched.values():
                load = watched.upstream.view.load
                if load is not None:
                    report = LoadReport(
                        load.running + load.waiting, round(load.kv_used * 1000), 1000
                    )
                    for client in self._runtime.clients:
                        client.router.take_report(watched.instance_id, report)
            await trio.sleep(self._section.health_interval_s)

    def overview(self) -> Overview:
        """What is known of the upstreams, those included that have never told what they serve."""
        away = [each for each in self._watched.values() if not each.upstream.view.is_healthy]
        unknown = [
            InstanceView(
                endpoint=str(_endpoint_of("")),
                id=watched.instance_id,
                state=AWAY,
                in_flight=0,
                incarnation=0,
                engine="openai",
                transports={"http": watched.upstream.place},
            )
            for watched in away
            if not watched.offered
        ]
        return overview(self._runtime, unknown, {each.instance_id for each in away})


def _endpoint_of(model: str) -> EndpointName:
    """One for each model; names that look alike in an address must not share it."""
    told = endpoint_of_model("m", model)[:40].rstrip("-")
    return EndpointName(_NAMESPACE, "openai", f"{told}-{zlib.crc32(model.encode()):08x}")


def alone(config: Config) -> Config:
    """With the planes of this one process: upstreams are found without a cluster.

    Nobody tells blocks here, no other router knows what this one sends, and whom discovery deletes
    has left.
    """
    kv = msgspec.structs.replace(config.router.kv, events=False, sync=False)
    return msgspec.structs.replace(
        config,
        router=msgspec.structs.replace(config.router, kv=kv, stale_grace_s=None),
        control_plane=msgspec.structs.replace(config.control_plane, backend="memory"),
        event_plane=msgspec.structs.replace(config.event_plane, backend="memory"),
    )
