"""Which models there are: model cards under `models/…`, one per model and worker.

A model is there as long as one worker publishes its card, and for a while longer if the card goes
but its worker does not: a store that was stopped takes cards and instances away in one moment, and
the workers bring them back in the next. Sans-IO: `http/discovery.py` feeds the watch in and tells
the model manager what came and went.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final
from urllib.parse import quote

import attrs
import msgspec

from ..errors import RemoteProtocolError, RequestError
from .generate import ModelCard
from .instances import EndpointName
from .undecodable import UNDECODABLE

__all__ = ["MODEL_PREFIX", "ModelChange", "ModelTable", "decode_card", "encode_card", "model_key"]

MODEL_PREFIX: Final = "models/"
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(ModelCard)


def model_key(model: str, instance_id: str) -> str:
    """Where one worker publishes its card of `model`; any text is a legal model name."""
    return f"{MODEL_PREFIX}{quote(model, safe='')}/{instance_id}"


def encode_card(card: ModelCard) -> bytes:
    """The value to publish."""
    return _encoder.encode(card)


def decode_card(key: str, value: bytes) -> ModelCard:
    """The card published under `key`; `RemoteProtocolError` if the two do not fit."""
    try:
        card = _decoder.decode(value)
    except UNDECODABLE as error:
        raise RemoteProtocolError(f"{key}: not a model card: {error}") from error
    if not key.startswith(model_key(card.name, "")):
        raise RemoteProtocolError(f"{key}: holds the card of {card.name!r}")
    try:
        EndpointName.parse(card.endpoint)
    except RequestError as error:
        # It must not speak for the model: the good cards would contradict it.
        raise RemoteProtocolError(f"{key}: {error.message}") from error
    return card


@attrs.frozen
class ModelChange:
    """What one step changed: models that came, models that went, entries refused and why."""

    added: tuple[ModelCard, ...] = ()
    removed: tuple[ModelCard, ...] = ()
    refused: tuple[str, ...] = ()


class ModelTable:
    """Cards by key; the first card of a model speaks for it until it goes.

    `patience_s` says of an endpoint and an instance id how long a card of theirs that was deleted
    is kept: 0 for a worker that is gone, or that leaves. It is asked again at every `review`.
    """

    def __init__(self, patience_s: Callable[[str, str], float] = lambda *_: 0.0) -> None:
        self._patience_s = patience_s
        self._cards: dict[str, ModelCard] = {}
        self._kept: dict[str, float] = {}
        """Keys that are deleted and whose cards are kept, with the time of their end."""

    @property
    def models(self) -> dict[str, ModelCard]:
        """Each model with the oldest of its cards."""
        found: dict[str, ModelCard] = {}
        for card in self._cards.values():
            found.setdefault(card.name, card)
        return found

    @property
    def review_at(self) -> float:
        """When the first of the kept cards ends; infinite if none is kept."""
        return min(self._kept.values(), default=math.inf)

    def replace(self, entries: Iterable[tuple[str, bytes]], now: float) -> ModelChange:
        """A snapshot or resync: what it does not name is deleted."""
        before = self.models
        fresh = dict(entries)
        for key in [k for k in self._cards if k not in fresh]:
            self._let_go(key, now)
        refused = [why for key, value in fresh.items() if (why := self._take(key, value))]
        return self._change(before, tuple(refused))

    def put(self, key: str, value: bytes) -> ModelChange:
        """One card was published."""
        before = self.models
        why = self._take(key, value)
        return self._change(before, (why,) if why else ())

    def delete(self, key: str, now: float) -> ModelChange:
        """One card was deleted."""
        before = self.models
        if key in self._cards:
            self._let_go(key, now)
        return self._change(before, ())

    def review(self, now: float) -> ModelChange:
        """Cards that were kept go with their workers, or when their time is over."""
        if not self._kept:
            return ModelChange()
        before = self.models
        for key, until in list(self._kept.items()):
            if until <= now or not self._patience_of(key):
                del self._kept[key], self._cards[key]
        return self._change(before, ())

    def _let_go(self, key: str, now: float) -> None:
        patience_s = self._patience_of(key)
        if not patience_s:
            del self._cards[key]
            self._kept.pop(key, None)
        else:
            # One that is kept already is not given more time by a resync that repeats the news.
            self._kept.setdefault(key, now + patience_s)

    def _patience_of(self, key: str) -> float:
        return self._patience_s(self._cards[key].endpoint, key.rpartition("/")[2])

    def _take(self, key: str, value: bytes) -> str:
        try:
            card = decode_card(key, value)
        except RemoteProtocolError as error:
            return error.message
        known = self.models.get(card.name)
        if known is not None and known.endpoint != card.endpoint and key not in self._cards:
            return f"{key}: {card.name!r} is served by {known.endpoint}, not by {card.endpoint}"
        self._cards[key] = card
        self._kept.pop(key, None)
        return ""

    def _change(self, before: dict[str, ModelCard], refused: tuple[str, ...]) -> ModelChange:
        after = self.models
        changed = {
            name for name in before if name in after and not _is_same(before[name], after[name])
        }
        return ModelChange(
            added=tuple(c for n, c in after.items() if n not in before or n in changed),
            removed=tuple(c for n, c in before.items() if n not in after or n in changed),
            refused=refused,
        )


def _is_same(one: ModelCard, other: ModelCard) -> bool:
    """Whether frontends need not care that another worker's card now speaks for the model."""
    return (one.endpoint, one.chat, one.completions) == (
        other.endpoint,
        other.chat,
        other.completions,
    )
