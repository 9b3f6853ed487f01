"""Which models there are: model cards under `models/…`, one per model and worker.

A model is there as long as one worker publishes its card, and for a while longer if the card goes
but its worker does not: a store that was stopped takes cards and instances away in one moment, and
the workers bring them back in the next. Workers whose cards disagree would give different answers
under one name, so only those are asked who agree with the card in force. They may differ in the
other names that they give the model (`AliasTable`): it has those of all who are asked. Sans-IO:
`http/models/discovery.py` feeds the watch in and tells the model manager what came and went.

A card under `models/chat/<name>` is read as well, and never written: an older layout that says
"for chats" and names no instance, so it speaks for every instance of its endpoint (`ANYBODY`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final
from urllib.parse import quote, unquote

import attrs
import msgspec

from ...errors import RemoteProtocolError, RequestError
from ..openai.generate import ModelCard
from ..undecodable import check_signed, decoded, quoted
from ..versions import check_versions, encode_entry
from .instances import EndpointName, is_instance_id

MODEL_PREFIX: Final = "models/"
ANYBODY: Final = ""
"""Stands for the instance that a card names, where it names none."""
_CHAT_PREFIX: Final = f"{MODEL_PREFIX}chat/"
_AGREED: Final = (
    "endpoint",
    "chat",
    "completions",
    "engine",
    "context_tokens_max",
    "fingerprint",
    "features",
    "passes_through",
)
"""What all cards of one model must say alike."""
encode_card: Final = encode_entry
_decoder = msgspec.json.Decoder(ModelCard)


def model_key(model: str, instance_id: str) -> str:
    """Where one worker publishes its card of `model`; any text is a legal model name."""
    return f"{MODEL_PREFIX}{quote(model, safe='')}/{instance_id}"


def decode_card(key: str, value: bytes) -> ModelCard:
    """The card published under `key`.

    Raises `RemoteProtocolError` if the two do not fit, if no member of this cluster signed it, or if who
    published it speaks no version that is spoken here.
    """
    check_signed(key, value)
    card = decoded(_decoder.decode, value, f"{key}: not a model card")
    try:
        EndpointName.parse(card.endpoint)
    except RequestError as error:
        # It must not speak for the model: the good cards would contradict it.
        raise RemoteProtocolError(f"{key}: {error.message}") from error
    if _names_instance(key, card):
        check_versions(key, value)
        return card
    if key.startswith(_CHAT_PREFIX):
        name = key.removeprefix(_CHAT_PREFIX)
        if card.name in (name, unquote(name)):
            return msgspec.structs.replace(card, completions=False)
    raise RemoteProtocolError(f"{key}: holds the card of {quoted(card.name)!r}")


def _names_instance(key: str, card: ModelCard) -> bool:
    folder, _, instance_id = key.rpartition("/")
    return f"{folder}/" == model_key(card.name, "") and is_instance_id(instance_id)


def _speaks_for(key: str, card: ModelCard) -> str:
    return key.rpartition("/")[2] if _names_instance(key, card) else ANYBODY


@attrs.frozen
class NameClaim:
    """What one model wants to be called besides its name."""

    created: int
    """Unix seconds of the card in force: the least is the oldest."""
    aliases: Collection[str]


@attrs.define(eq=False)
class AliasTable:
    """Other names of models: which model an alias means, where several cards claim it.

    A model's own name means that model, whoever claims it as an alias. Of two models that claim one
    alias the one that has it keeps it, and at first the older one gets it, so that frontends agree.
    """

    models: dict[str, str] = attrs.Factory(dict)
    """By alias, the name of the model that it means."""
    _refused: frozenset[tuple[str, str]] = frozenset()
    """Alias and model, of the claims that are not granted and were told of."""

    def settle(self, claims: Mapping[str, NameClaim]) -> list[str]:
        """Take what all models claim now; a sentence for each claim that is newly refused."""
        claimants: dict[str, list[str]] = {}
        for name, claim in sorted(claims.items(), key=lambda item: (item[1].created, item[0])):
            for alias in claim.aliases:
                claimants.setdefault(alias, []).append(name)
        held, self.models = self.models, {}
        refused: dict[tuple[str, str], str] = {}
        for alias, names in claimants.items():
            holder = held.get(alias, "")
            owner = holder if holder in names else names[0]
            why = f"it means {owner!r}"
            if alias in claims:
                owner, why = alias, "a model has that name"
            else:
                self.models[alias] = owner
            for name in names:
                if name != owner:
                    refused[alias, name] = f"alias {alias!r} of {name!r} is refused: {why}"
        fresh = [why for claim, why in refused.items() if claim not in self._refused]
        self._refused = frozenset(refused)
        return fresh


@attrs.frozen
class ModelChange:
    """What one step changed: models that came, changed and went, entries refused and why."""

    added: tuple[ModelCard, ...] = ()
    updated: tuple[ModelCard, ...] = ()
    """Another card is in force for a model that is there as before."""
    removed: tuple[ModelCard, ...] = ()
    refused: tuple[str, ...] = ()
    """Entries that are no cards, cards that disagree with the one in force, aliases that are taken."""


@attrs.define(eq=False)
class _Model:
    """All cards of one name, and whom to ask for it."""

    card: ModelCard
    """The one in force: it stays while a card that agrees with it is there."""
    cards: dict[str, ModelCard] = attrs.Factory(dict)
    """By key, those that disagree included."""
    servers: dict[str, str] = attrs.Factory(dict)
    """The instances whose cards agree with the one in force, with the keys of those."""
    asked: frozenset[str] = frozenset()
    """The same set until others are there, so that whoever knows it need not look through it."""

    def put(self, key: str, card: ModelCard) -> None:
        self.cards[key] = card
        instance_id = _speaks_for(key, card)
        if _agree(card, self.card):
            self.servers[instance_id] = key
        else:
            self.servers.pop(instance_id, None)

    def drop(self, key: str) -> None:
        card = self.cards.pop(key)
        self.servers.pop(_speaks_for(key, card), None)

    @property
    def claim(self) -> NameClaim:
        """The other names that those who are asked give it."""
        told = (alias for key in self.servers.values() for alias in self.cards[key].aliases)
        return NameClaim(self.card.created, dict.fromkeys(told))

    def elect(self) -> None:
        """Let the oldest card that is left be in force, unless one stands by the last."""
        if self.servers:
            return
        self.card = min(self.cards.items(), key=lambda item: (item[1].created, item[0]))[1]
        for key, card in self.cards.items():
            if _agree(card, self.card):
                self.servers[_speaks_for(key, card)] = key

    def settle(self) -> None:
        """See who is asked now. Servers that a body is passed on to may differ in context: the least is told."""
        if self.asked != self.servers.keys():
            self.asked = frozenset(self.servers)
        if self.card.passes_through:
            told = [self.cards[key].context_tokens_max for key in self.servers.values()]
            least = min((each for each in told if each), default=0)
            self.card = msgspec.structs.replace(self.card, context_tokens_max=least)


class ModelTable:
    """Cards by model; while some agree with the one in force, it stays in force.

    `removal_grace_s` says of an endpoint and an instance id how long a card of theirs that was deleted
    is kept: 0 for a worker that is gone, or that leaves. It is asked again at every `review`.
    """

    def __init__(self, removal_grace_s: Callable[[str, str], float] = lambda *_: 0.0) -> None:
        self._removal_grace_s = removal_grace_s
        self._models: dict[str, _Model] = {}
        self.aliases = AliasTable()
        self._names: dict[str, str] = {}
        """From key to model."""
        self._kept: dict[str, float] = {}
        """Keys that are deleted and whose cards are kept, with the time of their end."""
        self._before: dict[str, ModelCard | None] = {}
        """What was in force for the models that the present step touches."""
        self._brought: dict[str, ModelCard] = {}
        """The cards that the present step has brought, by key."""

    @property
    def models(self) -> dict[str, ModelCard]:
        """Each model with the card in force."""
        return {name: model.card for name, model in self._models.items()}

    @property
    def review_at(self) -> float:
        """When the first of the kept cards ends; infinite if none is kept."""
        return min(self._kept.values(), default=math.inf)

    def servers(self, name: str) -> frozenset[str]:
        """The instances to ask for a model, or `ANYBODY` among them for all of its endpoint.

        The same object as before while they are the same.
        """
        model = self._models.get(name)
        return frozenset() if model is None else model.asked

    def is_replaced(self, card: ModelCard) -> bool:
        """Whether the card that is in force for its model contradicts `card`, which was."""
        model = self._models.get(card.name)
        return model is not None and model.card is not card and not _agree(model.card, card)

    def refused_count(self, name: str) -> int:
        """How many cards of a model disagree with the one in force."""
        model = self._models.get(name)
        return 0 if model is None else len(model.cards) - len(model.servers)

    def replace(self, entries: Iterable[tuple[str, bytes]], now: float) -> ModelChange:
        """A snapshot or resync: what it does not name is deleted."""
        fresh = dict(entries)
        for key in [k for k in self._names if k not in fresh]:
            self._let_go(key, now)
        refused: list[str] = []
        cards: list[tuple[str, ModelCard]] = []
        for key, value in fresh.items():
            try:
                cards.append((key, decode_card(key, value)))
            except RemoteProtocolError as error:
                refused.append(error.message)
        # The oldest first, so that frontends agree on which of two contradicting cards is in force.
        for key, card in sorted(cards, key=lambda item: (item[1].created, item[0])):
            self._take(key, card)
        return self._change(refused)

    def put(self, key: str, value: bytes) -> ModelChange:
        """One card was published. What an older value of the key said outlives junk."""
        try:
            self._take(key, decode_card(key, value))
        except RemoteProtocolError as error:
            return ModelChange(refused=(error.message,))
        return self._change()

    def delete(self, key: str, now: float) -> ModelChange:
        if key in self._names:
            self._let_go(key, now)
        return self._change()

    def review(self, now: float) -> ModelChange:
        """Cards that were kept go with their workers, or when their time is over."""
        for key, until in list(self._kept.items()):
            if until <= now or not self._removal_grace_of(key):
                self._drop(key)
        return self._change()

    def _let_go(self, key: str, now: float) -> None:
        removal_grace_s = self._removal_grace_of(key)
        if not removal_grace_s:
            self._drop(key)
        else:
            # One that is kept already is not given more time by a resync that repeats the deletion.
            self._kept.setdefault(key, now + removal_grace_s)

    def _removal_grace_of(self, key: str) -> float:
        card = self._models[self._names[key]].cards[key]
        return self._removal_grace_s(card.endpoint, _speaks_for(key, card))

    def _take(self, key: str, card: ModelCard) -> None:
        self._kept.pop(key, None)
        if self._names.get(key, card.name) != card.name:
            self._drop(key)
        self._touch(card.name)
        model = self._models.setdefault(card.name, _Model(card))
        if model.cards.get(key) != card:
            self._brought[key] = card
        model.put(key, card)
        self._names[key] = card.name

    def _drop(self, key: str) -> None:
        self._kept.pop(key, None)
        name = self._names.pop(key)
        self._touch(name)
        self._models[name].drop(key)

    def _touch(self, name: str) -> None:
        model = self._models.get(name)
        self._before.setdefault(name, None if model is None else model.card)

    def _change(self, refused: Iterable[str] = ()) -> ModelChange:
        """Settle the models that the step has touched, once it is whole."""
        steps, self._before = self._before, {}
        brought, self._brought = self._brought, {}
        for name in steps:
            if self._models[name].cards:
                self._models[name].elect()
                self._models[name].settle()
            else:
                del self._models[name]
        contradictions = []
        for key, card in brought.items():
            in_force = self._models[card.name].card
            if _agree(card, in_force):
                continue
            said = [
                f"{name} {getattr(card, name)!r} where the model has {getattr(in_force, name)!r}"
                for name in _AGREED
                if getattr(card, name) != getattr(in_force, name)
            ]
            contradictions.append(
                f"{key}: says {', '.join(said)}; it is not asked for {card.name!r}"
            )
        after = {name: self._models[name].card for name in steps if name in self._models}
        return ModelChange(
            added=tuple(card for name, card in after.items() if steps[name] is None),
            updated=tuple(
                card
                for name, card in after.items()
                if (old := steps[name]) is not None and not _is_alike(old, card)
            ),
            removed=tuple(
                old for name, old in steps.items() if old is not None and name not in after
            ),
            refused=(
                *refused,
                *contradictions,
                *self.aliases.settle({name: each.claim for name, each in self._models.items()}),
            ),
        )


def _is_alike(one: ModelCard, other: ModelCard) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in _AGREED)


def _agree(one: ModelCard, other: ModelCard) -> bool:
    """Whether two workers give the same answers, as far as their cards say."""
    if one.passes_through and other.passes_through:
        other = msgspec.structs.replace(other, context_tokens_max=one.context_tokens_max)
    return _is_alike(one, other)
