"""What discovery says: the engines, the frontends, and the models as a frontend has them that starts now."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import attrs

from ..errors import RemoteProtocolError, TrinamoError
from ..planes import ControlPlane, Entry
from ..protocol.discovery.instances import (
    FRONTEND_PREFIX,
    INSTANCE_PREFIX,
    FrontendEntry,
    decode_frontend,
    decode_instance,
)
from ..protocol.discovery.model_cards import MODEL_PREFIX, ModelTable, decode_card
from ..protocol.openai.generate import ModelCard
from ..protocol.versions import read_build

TOLD_MAX: Final = 16
"""What the cards of one model say, where they differ."""


@attrs.define
class InstanceLook:
    """One instance; `health` is what its status port says, `problem` why it says nothing."""

    endpoint: str
    id: str
    lease_id: str
    incarnation: int
    is_draining: bool
    transports: dict[str, str]
    metadata: dict[str, str]
    health: dict[str, Any] | None = None
    problem: str = ""
    seen: str = ""
    """How the frontend sees it, if it is asked instead of etcd, or instead of the instance itself."""
    in_flight: int | None = None
    """The frontend's requests under way to it, if it is asked."""
    active: int | None = None
    """Requests that it has, whoever sent them, as the frontend was told; None if it was not."""
    kv_used: float | None = None
    """The fraction of its KV cache in use, likewise."""
    name: str = ""
    """What people call it, as far as anybody has said."""
    build: str = ""
    """Of its process, as it registered it."""
    unreached: list[str] = attrs.field(factory=list)
    """Who does not reach it where requests go, and why; in words."""


@attrs.define
class ModelLook:
    """One model, and how many instances publish it and, as far as they were asked, answer."""

    name: str
    endpoint: str
    engine: str
    context_tokens_max: int
    registered: int = 0
    instances: int = 0
    refused: int = 0
    """Instances that frontends do not ask, as their cards contradict the one in force."""
    aliases: list[str] = attrs.field(factory=list)


@attrs.define
class Listing:
    """What the control plane names."""

    etcd: str
    """What it says of itself."""
    instances: list[InstanceLook] = attrs.field(factory=list)
    """Engines; an endpoint that one registers besides, as for its weights, is none."""
    frontends: list[FrontendEntry] = attrs.field(factory=list)
    models: list[ModelLook] = attrs.field(factory=list)
    refused: list[str] = attrs.field(factory=list)
    """Entries that make no sense, cards that contradict their model's, aliases that are taken."""

    def copy(self) -> Listing:
        return attrs.evolve(
            self,
            instances=[attrs.evolve(e, metadata=dict(e.metadata)) for e in self.instances],
            models=[attrs.evolve(each) for each in self.models],
            refused=list(self.refused),
        )


async def read_listing(control: ControlPlane) -> Listing:
    """Read it all; raises what the control plane does."""
    listing = Listing(await control.check_health())
    for entry in (await control.range(INSTANCE_PREFIX)).entries:
        try:
            each = decode_instance(entry.key, entry.value)
        except TrinamoError as error:
            listing.refused.append(error.message)
            continue
        if each.metadata.get("for", "generate") in ("generate", "prefill"):
            listing.instances.append(
                InstanceLook(
                    endpoint=each.endpoint,
                    id=each.id,
                    lease_id=f"{entry.lease_id:x}",
                    incarnation=each.incarnation,
                    is_draining=each.draining,
                    transports=dict(each.transports),
                    metadata=dict(each.metadata),
                    name=each.transports.get("http", "") if "upstream" in each.metadata else "",
                    build=read_build(entry.value),
                )
            )
    for entry in (await control.range(FRONTEND_PREFIX)).entries:
        try:
            listing.frontends.append(decode_frontend(entry.key, entry.value))
        except TrinamoError as error:
            listing.refused.append(error.message)
    listing.models, refused = look_at_models((await control.range(MODEL_PREFIX)).entries)
    listing.refused += refused
    return listing


def look_at_models(entries: Sequence[Entry]) -> tuple[list[ModelLook], list[str]]:
    """The models of these cards, and a sentence for each card or alias that is refused."""
    table = ModelTable()
    refused = table.replace(((each.key, each.value) for each in entries), 0.0).refused
    by_name: dict[str, list[ModelCard]] = {}
    for entry in entries:
        with suppress(RemoteProtocolError):
            card = decode_card(entry.key, entry.value)
            by_name.setdefault(card.name, []).append(card)

    def told(values: list[str]) -> str:
        """What its cards say of a model; where they differ, all that they say."""
        return " / ".join(list(dict.fromkeys(values))[:TOLD_MAX])

    looks = [
        ModelLook(
            name,
            told([card.endpoint for card in cards]),
            told([card.engine for card in cards]),
            min(card.context_tokens_max for card in cards),
            registered=len(cards),
            refused=table.refused_count(name),
            aliases=[alias for alias, meant in table.aliases.models.items() if meant == name],
        )
        for name, cards in by_name.items()
    ]
    return looks, list(refused)


def refusals(refused: Sequence[str]) -> list[str]:
    """Those for the same reason as one sentence, with their number, in the order of the first ones."""
    alike: dict[str, list[str]] = {}
    for each in refused:
        alike.setdefault(each.partition(": ")[2] or each, []).append(each)
    return [
        first + (f"; and {len(others)} more likewise" if others else "")
        for first, *others in alike.values()
    ]
