"""Which models there are: cards that come and go, and cards that are kept while their worker stays."""

from __future__ import annotations

import math

from trinamo.runtime.protocol.generate import ModelCard
from trinamo.runtime.protocol.model_cards import ModelChange, ModelTable, encode_card, model_key

ENDPOINT = "ns/backend/generate"
GRACE_S = 10.0


class Workers:
    """Who is there, as a router would say."""

    def __init__(self, *ids: str) -> None:
        self.here = set(ids)

    def patience_s(self, endpoint: str, instance_id: str) -> float:
        return GRACE_S if endpoint == ENDPOINT and instance_id in self.here else 0.0


def card(name: str, *, chat: bool = True) -> ModelCard:
    return ModelCard(name=name, endpoint=ENDPOINT, chat=chat)


def table(workers: Workers, *published: tuple[str, str]) -> ModelTable:
    made = ModelTable(workers.patience_s)
    for name, worker in published:
        made.put(model_key(name, worker), encode_card(card(name)))
    return made


def names(made: ModelTable) -> list[str]:
    return list(made.models)


def test_a_model_is_there_while_one_card_is() -> None:
    made = table(Workers(), ("m", "1"), ("m", "2"))
    assert made.delete(model_key("m", "1"), 0) == ModelChange()
    assert made.delete(model_key("m", "2"), 0) == ModelChange(removed=(card("m"),))
    assert made.delete(model_key("m", "2"), 0) == ModelChange()
    assert names(made) == []


def test_a_card_that_is_deleted_stays_while_its_worker_does_and_goes_with_it() -> None:
    workers = Workers("1")
    made = table(workers, ("m", "1"))
    assert made.delete(model_key("m", "1"), 0) == ModelChange()
    assert made.review(5) == ModelChange()
    workers.here.clear()
    assert made.review(6) == ModelChange(removed=(card("m"),))
    assert made.review_at == math.inf


def test_a_card_is_kept_for_the_grace_and_a_resync_does_not_prolong_it() -> None:
    made = table(Workers("1"), ("m", "1"))
    made.delete(model_key("m", "1"), 0)
    assert made.replace([], 4) == ModelChange()
    assert made.review_at == GRACE_S
    assert made.review(GRACE_S - 0.1) == ModelChange()
    assert made.review(GRACE_S) == ModelChange(removed=(card("m"),))


def test_a_card_that_is_published_again_is_no_longer_kept() -> None:
    made = table(Workers("1"), ("m", "1"))
    made.delete(model_key("m", "1"), 0)
    assert made.put(model_key("m", "1"), encode_card(card("m"))) == ModelChange()
    assert made.review_at == math.inf
    assert made.review(100) == ModelChange()
    assert names(made) == ["m"]


def test_a_resync_drops_the_cards_of_those_who_are_gone_and_keeps_the_others() -> None:
    made = table(Workers("1"), ("m", "1"), ("n", "2"), ("o", "1"))
    entries = [(model_key("o", "1"), encode_card(card("o")))]
    assert made.replace(entries, 0) == ModelChange(removed=(card("n"),))
    assert names(made) == ["m", "o"]


def test_a_kept_card_that_is_refused_anew_is_kept_all_the_same() -> None:
    """What a key said last stays in force, as ever: junk is no sign of life, nor of death."""
    made = table(Workers("1"), ("m", "1"))
    made.delete(model_key("m", "1"), 0)
    assert len(made.put(model_key("m", "1"), b"junk").refused) == 1
    assert made.review(GRACE_S) == ModelChange(removed=(card("m"),))
