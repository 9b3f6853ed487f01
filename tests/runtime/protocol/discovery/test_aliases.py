"""Which model an alias means, and who is refused it."""

from __future__ import annotations

from trinamo.runtime.protocol.discovery.model_cards import (
    AliasTable,
    ModelTable,
    NameClaim,
    encode_card,
    model_key,
)
from trinamo.runtime.protocol.openai.generate import ModelCard


def published(made: ModelTable, name: str, worker: str, *aliases: str, created: int = 1) -> str:
    card = ModelCard(name=name, endpoint="ns/b/g", aliases=list(aliases), created=created)
    key = model_key(name, worker)
    refused = made.put(key, encode_card(card)).refused
    assert len(refused) <= 1
    return " ".join(refused)


def test_of_two_claims_the_older_model_s_wins_and_the_other_is_told_of_once() -> None:
    table = AliasTable()
    claims = {"young": NameClaim(2, ["chat"]), "old": NameClaim(1, ["chat"])}

    assert table.settle(claims) == ["alias 'chat' of 'young' is refused: it means 'old'"]
    assert table.models == {"chat": "old"}
    assert table.settle(claims) == []


def test_who_has_an_alias_keeps_it_when_an_older_model_claims_it() -> None:
    table = AliasTable()
    table.settle({"young": NameClaim(2, ["chat"])})

    assert table.settle({"young": NameClaim(2, ["chat"]), "old": NameClaim(1, ["chat"])}) == [
        "alias 'chat' of 'old' is refused: it means 'young'"
    ]
    table.settle({"old": NameClaim(1, ["chat"])})
    assert table.models == {"chat": "old"}


def test_a_model_s_own_name_is_never_another_one_s_alias() -> None:
    table = AliasTable()
    table.settle({"a": NameClaim(1, ["b"])})
    assert table.models == {"b": "a"}

    told = table.settle({"a": NameClaim(1, ["b"]), "b": NameClaim(2, [])})
    assert told == ["alias 'b' of 'a' is refused: a model has that name"]
    assert table.models == {}


def test_a_model_has_the_aliases_of_all_its_workers_until_the_last_of_them_is_gone() -> None:
    made = ModelTable()
    assert published(made, "m", "1", "x") == ""
    assert published(made, "m", "2", "x", "y") == ""
    assert made.aliases.models == {"x": "m", "y": "m"}
    made.delete(model_key("m", "2"), 0)
    assert made.aliases.models == {"x": "m"}
    made.delete(model_key("m", "1"), 0)
    assert made.aliases.models == {}


def test_a_card_that_contradicts_its_model_s_gives_it_no_alias() -> None:
    made = ModelTable()
    published(made, "m", "1")
    other = ModelCard(name="m", endpoint="ns/b/g", engine="echo", aliases=["x"])
    assert made.put(model_key("m", "2"), encode_card(other)).refused
    assert made.aliases.models == {}


def test_junk_among_the_aliases_refuses_the_card() -> None:
    made = ModelTable()
    for aliases in ([""], ["x" * 257], [f"a{n}" for n in range(33)]):
        assert "not a model card" in published(made, "m", "1", *aliases)
    assert made.models == {}
