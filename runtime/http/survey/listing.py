"""What discovery says: the engines, the frontends, and the models as a frontend has them that starts now."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import attrs

from ...errors import RemoteProtocolError, TrinamoError
from ...planes import ControlPlane, Entry
from ...protocol.discovery.frontends import FRONTEND_PREFIX, FrontendEntry, decode_frontend
from ...protocol.discovery.instances import INSTANCE_PREFIX, decode_instance
from ...protocol.discovery.model_cards import MODEL_PREFIX, ModelTable, decode_card
from ...protocol.openai.generate import ModelCard
from .instances import InstanceLook, instance_look

TOLD_MAX: Final = 16
"""What the cards of one model say, where they differ."""


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
        """Another one that may be written into."""
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
            look = instance_look(decode_instance(entry.key, entry.value), entry)
        except TrinamoError as error:
            listing.refused.append(error.message)
        else:
            listing.instances += [look] if look.is_engine else []
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
    cards: dict[str, list[ModelCard]] = {}
    for entry in entries:
        with suppress(RemoteProtocolError):
            card = decode_card(entry.key, entry.value)
            cards.setdefault(card.name, []).append(card)
    return [_look(name, told, table) for name, told in cards.items()], list(refused)


def _look(name: str, cards: list[ModelCard], table: ModelTable) -> ModelLook:
    """What its cards say of a model; where they differ, all that they say."""

    def told(values: list[str]) -> str:
        return " / ".join(list(dict.fromkeys(values))[:TOLD_MAX])

    return ModelLook(
        name,
        told([card.endpoint for card in cards]),
        told([card.engine for card in cards]),
        min(card.context_tokens_max for card in cards),
        registered=len(cards),
        refused=table.refused_count(name),
        aliases=[alias for alias, meant in table.aliases.models.items() if meant == name],
    )
