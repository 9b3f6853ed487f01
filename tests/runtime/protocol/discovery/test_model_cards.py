"""Which models there are: cards that come and go, and cards that are kept while their worker stays."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest

from trinamo.runtime.protocol.discovery.model_cards import (
    ANYBODY,
    ModelChange,
    ModelTable,
    encode_card,
    model_key,
)
from trinamo.runtime.protocol.openai.generate import ModelCard

ENDPOINT = "ns/backend/generate"
GRACE_S = 10.0


class Workers:
    """Who is there, as a router would say."""

    def __init__(self, *ids: str) -> None:
        self.here = set(ids)

    def removal_grace_s(self, endpoint: str, instance_id: str) -> float:
        return GRACE_S if endpoint == ENDPOINT and instance_id in self.here else 0.0


def card(name: str, *, chat: bool = True) -> ModelCard:
    return ModelCard(name=name, endpoint=ENDPOINT, chat=chat)


def table(workers: Workers, *published: tuple[str, str]) -> ModelTable:
    made = ModelTable(workers.removal_grace_s)
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


# --- cards that disagree -------------------------------------------------------------------------


def variant(name: str, **changes: Any) -> ModelCard:
    return ModelCard(name=name, endpoint=ENDPOINT, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": "echo"},
        {"context_tokens_max": 64},
        {"fingerprint": "other weights"},
        {"completions": False},
    ],
)
def test_who_contradicts_the_card_in_force_is_told_of_once_and_not_asked(
    changes: dict[str, Any],
) -> None:
    made = table(Workers(), ("m", "1"))
    odd = encode_card(variant("m", **changes))
    change = made.put(model_key("m", "2"), odd)
    assert (change.added, change.updated, change.removed) == ((), (), ())
    (why,) = change.refused
    assert next(iter(changes)) in why
    assert (set(made.servers("m")), made.refused_count("m")) == ({"1"}, 1)
    assert made.put(model_key("m", "2"), odd) == ModelChange()
    # A restart under another id, the same contradiction: told again, since it is another worker.
    assert made.put(model_key("m", "3"), odd).refused


def test_the_last_that_agreed_hands_over_to_the_oldest_that_did_not() -> None:
    made = table(Workers(), ("m", "1"))
    for worker, created, context in (("2", 30, 64), ("3", 20, 128), ("4", 40, 128)):
        new = variant("m", created=created, context_tokens_max=context)
        made.put(model_key("m", worker), encode_card(new))
    change = made.delete(model_key("m", "1"), 0)
    assert [each.context_tokens_max for each in change.updated] == [128]
    assert (change.added, change.removed, set(made.servers("m"))) == ((), (), {"3", "4"})
    assert made.refused_count("m") == 1


def test_a_card_is_replaced_where_one_that_contradicts_it_is_in_force() -> None:
    made = table(Workers(), ("m", "1"))
    began = made.models["m"]
    made.put(model_key("m", "2"), encode_card(variant("m", created=9, aliases=["other"])))
    made.put(model_key("m", "3"), encode_card(variant("m", created=10, fingerprint="new")))
    for worker, is_replaced in (("1", False), ("2", True), ("3", False)):
        made.delete(model_key("m", worker), 0)
        assert made.is_replaced(began) is is_replaced
    assert not made.models


def test_of_cards_that_are_found_together_the_oldest_is_in_force() -> None:
    """So that frontends which start at different times agree."""
    entries = [
        (model_key("m", worker), encode_card(variant("m", created=created, engine=worker)))
        for worker, created in (("1", 30), ("2", 10), ("3", 20))
    ]
    made = ModelTable()
    assert len(made.replace(entries, 0).refused) == 2
    assert made.models["m"].engine == "2"


def test_a_worker_s_own_new_card_takes_the_place_of_its_old_one() -> None:
    made = table(Workers(), ("m", "1"))
    new = variant("m", context_tokens_max=64)
    assert made.put(model_key("m", "1"), encode_card(new)) == ModelChange(updated=(new,))
    assert set(made.servers("m")) == {"1"}


def test_a_resync_by_which_all_workers_are_others_does_not_hand_over() -> None:
    made = table(Workers(), ("m", "1"))
    odd = (model_key("m", "2"), encode_card(variant("m", engine="odd")))
    made.put(*odd)
    entries = [odd, (model_key("m", "3"), encode_card(card("m")))]
    assert made.replace(entries, 0) == ModelChange()
    assert set(made.servers("m")) == {"3"}


# --- the older layout ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-3-70b", "org/llama", "chat", "a"])
def test_a_card_of_the_older_layout_speaks_for_anybody_and_for_chats(name: str) -> None:
    for key in (f"models/chat/{name}", f"models/chat/{quote(name, safe='')}"):
        made = ModelTable()
        (added,) = made.put(key, encode_card(variant(name))).added
        assert (added.name, added.chat, added.completions) == (name, True, False)
        assert set(made.servers(name)) == {ANYBODY}
        assert made.delete(key, 0).removed == (added,)


def test_a_model_called_chat_has_its_own_cards() -> None:
    made = table(Workers(), ("chat", "1f"))
    assert set(made.servers("chat")) == {"1f"}
    assert made.models["chat"].completions
    assert made.put("models/chat/other", encode_card(card("m"))).refused


# --- growth --------------------------------------------------------------------------------------


def calls_of(act: Callable[[], object]) -> int:
    """How many functions `act` calls: the same on every machine, unlike time."""
    count = 0

    def seen(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("models", ["one", "many"])
def test_a_snapshot_costs_in_proportion_to_its_cards(models: str) -> None:
    def cost(number: int) -> int:
        names = ["m" if models == "one" else f"m{each}" for each in range(number)]
        entries = [
            (model_key(name, f"{each:x}"), encode_card(card(name)))
            for each, name in enumerate(names)
        ]
        made = ModelTable()
        come = calls_of(lambda: made.replace(entries, 0))
        return come + calls_of(lambda: made.replace(entries[:1], 0))

    assert cost(400) < 2.2 * cost(200)
