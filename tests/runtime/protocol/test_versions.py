"""Which versions of the protocol fit: who tells none, or none that is spoken here, is refused by name."""

from __future__ import annotations

import msgspec
import pytest

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.planes.control import Entry
from trinamo.runtime.protocol.discovery.instances import (
    FrontendEntry,
    Instance,
    decode_frontend,
    decode_instance,
    encode_frontend,
    encode_instance,
    frontend_key,
)
from trinamo.runtime.protocol.discovery.model_cards import (
    ModelTable,
    decode_card,
    encode_card,
    model_key,
)
from trinamo.runtime.protocol.openai.generate import ModelCard
from trinamo.runtime.protocol.versions import (
    BUILD,
    SPOKEN,
    Version,
    check_versions,
    common_version,
    encode_entry,
)
from trinamo.runtime.view.listing import look_at_models

OURS = SPOKEN[-1]
INSTANCE = Instance(endpoint="a/b/c", id="1f", transports={"tcp": "h:1"})
CARD = ModelCard(name="m", endpoint="a/b/c")
FRONTEND = FrontendEntry(id="0" * 16, url="http://h:1", status="http://h:2")


def entry(**told: object) -> bytes:
    return msgspec.json.encode({"id": "1f"} | told)


def without_versions(value: bytes) -> bytes:
    fields = msgspec.json.decode(value)
    del fields["protocol"], fields["build"]
    return msgspec.json.encode(fields)


def test_an_entry_tells_versions_and_build_beside_what_it_is_for() -> None:
    told = msgspec.json.decode(encode_entry(FrontendEntry(id="1f", url="", status="")))
    assert told == {
        "id": "1f",
        "url": "",
        "status": "",
        "protocol": [*map(str, SPOKEN)],
        "build": BUILD,
    }


@pytest.mark.parametrize(
    ("told", "common"),
    [
        ((f"{OURS}",), OURS),
        ((f"{OURS.major}.{OURS.minor + 1}",), OURS),
        ((f"{OURS.major}.{OURS.minor + 1}", f"{OURS.major + 1}.0"), OURS),
        ((f"{OURS.major}.99999", "junk"), OURS),
        ((f"{OURS.major + 1}.0",), None),
        ((f"{OURS.major}",), None),
        ((f"{OURS.major}.0.0",), None),
        ((f" {OURS}",), None),
        (("01.0",), None),
        (("999999.0",), None),
        ((), None),
    ],
)
def test_two_fit_if_they_speak_one_major(told: tuple[str, ...], common: Version | None) -> None:
    assert common_version(told) == common


def test_of_two_majors_that_both_speak_the_newer_is_spoken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trinamo.runtime.protocol.versions.SPOKEN", (Version(1, 4), Version(2, 1)))
    common_version.cache_clear()
    try:
        assert common_version(("1.9", "2.0")) == (2, 0)
        assert common_version(("1.2",)) == (1, 2)
        assert common_version(("3.0",)) is None
    finally:
        common_version.cache_clear()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (entry(), "an older build speaks protocol of before 3.0, and this build"),
        (entry(), "it is to be upgraded"),
        (entry(protocol=["9.0"], build="9.1"), "build 9.1 speaks protocol 9.0"),
        (entry(protocol=["9.0"], build="9.1"), "this one is to be upgraded"),
        (entry(protocol=["x" * 100_000] * 100, build="y" * 100_000), "it is to be upgraded"),
        (entry(protocol="1.0"), "it tells no versions"),
        (b"junk", "it tells no versions"),
    ],
)
def test_what_does_not_fit_is_refused_in_words_that_say_what_to_do(
    value: bytes, words: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=r"^instances/a/b/c/1f: ") as refused:
        check_versions("instances/a/b/c/1f", value)
    assert words in refused.value.message
    assert len(refused.value.message) < 400


def test_instances_cards_and_frontends_of_another_protocol_are_refused_each() -> None:
    key, name = model_key("m", "1f"), frontend_key(FRONTEND.id)
    assert decode_instance(INSTANCE.key, encode_instance(INSTANCE)) == INSTANCE
    assert decode_card(key, encode_card(CARD)) == CARD
    assert decode_frontend(name, encode_frontend(FRONTEND)) == FRONTEND
    with pytest.raises(RemoteProtocolError, match=r"before 3\.0"):
        decode_instance(INSTANCE.key, without_versions(encode_instance(INSTANCE)))
    with pytest.raises(RemoteProtocolError, match=r"before 3\.0"):
        decode_card(key, without_versions(encode_card(CARD)))
    with pytest.raises(RemoteProtocolError, match=r"before 3\.0"):
        decode_frontend(name, without_versions(encode_frontend(FRONTEND)))


def test_a_model_of_another_protocol_is_not_listed_and_status_says_why() -> None:
    value = without_versions(encode_card(CARD))
    table = ModelTable()
    (why,) = table.put(model_key("m", "1f"), value).refused
    assert not table.models
    assert "speaks protocol of before 3.0" in why

    models, refused = look_at_models([Entry(model_key("m", "1f"), value, 1, 1)])

    assert (models, refused) == ([], [why])


def test_fields_that_a_newer_minor_adds_are_skipped() -> None:
    fields = msgspec.json.decode(encode_instance(INSTANCE))
    newer = fields | {"protocol": [f"{OURS.major}.{OURS.minor + 1}"], "new": {"a": [1]}}
    assert decode_instance(INSTANCE.key, msgspec.json.encode(newer)) == INSTANCE
