"""The models that discovery names, as a frontend that starts now would have them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import attrs

from ...errors import RemoteProtocolError
from ...planes import Entry
from ...protocol.discovery.model_cards import ModelTable, decode_card
from ...protocol.openai.generate import ModelCard

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
