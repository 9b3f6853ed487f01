"""What `trinamo status` and `trinamo doctor` say of models, aliases, and who holds files."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from rich.console import Console

from trinamo.cli.doctor.discovery import (
    cluster_findings,
    reach_findings,
    shedding_findings,
)
from trinamo.cli.doctor.finding import FindingVerdict
from trinamo.cli.status.text import survey_tables
from trinamo.runtime.config.http import HttpConfig
from trinamo.runtime.planes import Entry
from trinamo.runtime.protocol.discovery.model_cards import encode_card, model_key
from trinamo.runtime.protocol.openai.generate import ModelCard
from trinamo.runtime.protocol.undecodable import Unsigned
from trinamo.runtime.view.facts import weights_rows
from trinamo.runtime.view.listing import InstanceLook, look_at_models
from trinamo.runtime.view.survey import FrontendLook, Survey

SHA = "ab" * 32
HELD = {"model": "m", "sha256": SHA, "byte_count": 98_000_000}
LENT = {"taker": "host, pid 7", "sha256": SHA, "done": 3, "count": 12}


def instance(number: int, weights: Any = None) -> InstanceLook:
    return InstanceLook(
        endpoint="trinamo/backend/generate",
        id=f"{number:x}",
        lease_id="1",
        incarnation=1,
        is_draining=False,
        transports={},
        metadata={},
        health={} if weights is None else {"weights": weights},
    )


def card(worker: str, **fields: Any) -> Entry:
    made = ModelCard(endpoint="ns/b/g", **{"name": "m", "created": 1, **fields})
    key = model_key(made.name, worker)
    return Entry(key=key, value=encode_card(made), create_revision=1, mod_revision=1, lease_id=1)


def shown(survey: Survey) -> str:
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        for part in survey_tables(survey):
            console.print(part)
    return capture.get()


def surveyed() -> Survey:
    survey = Survey(etcd="etcd", cluster=None, frontend=None)
    survey.models, survey.refused = look_at_models(
        [
            card("1", engine="exact", aliases=["gpt"]),
            card("2", engine="echo", created=2),
            card("3", name="other", created=3, aliases=["gpt"]),
        ]
    )
    survey.instances = [
        instance(1, {"held": [HELD], "lent": [LENT]}),
        instance(2, {"held": [HELD], "lent": []}),
        instance(3),
    ]
    return survey


def test_a_model_has_its_aliases_and_its_contradictions() -> None:
    survey = surveyed()
    assert [(m.name, m.registered, m.refused, m.aliases) for m in survey.models] == [
        ("m", 2, 1, ["gpt"]),
        ("other", 1, 0, []),
    ]
    assert len(survey.refused) == 2


def test_the_tables_show_aliases_refusals_and_files() -> None:
    text = shown(surveyed())
    for told in ("gpt", "1 refused", "refused: alias 'gpt'", "98 MB", "host, pid 7: 25 %"):
        assert told in text


def test_the_blocks_of_several_models_of_one_worker_are_told_apart() -> None:
    health = {
        "blocks": {"used": 3, "total": 512},
        "blocks_by_model": {"a": {"used": 3, "total": 512}, "b": {"used": 0, "total": 0}},
    }
    looks = [instance(1), instance(1)]
    for look, model in zip(looks, ("a", "b"), strict=True):
        look.health, look.metadata = health, {"model": model}
    text = shown(Survey(etcd="", cluster=None, frontend=None, instances=looks))
    assert text.count("3/512") == 1


def test_doctor_warns_of_each_refusal_and_names_a_file_once() -> None:
    found = list(cluster_findings(surveyed()))
    assert [(each.what, each.verdict) for each in found] == [
        ("models", FindingVerdict.GOOD),
        ("models", FindingVerdict.WARNING),
        ("models", FindingVerdict.WARNING),
        ("weights", FindingVerdict.GOOD),
    ]
    assert "held by 2 workers" in found[-1].text
    assert "host, pid 7: 25 %" in found[-1].text


def test_doctor_names_what_nobody_signed_and_says_what_to_do() -> None:
    survey = Survey(etcd="etcd", cluster=None, frontend=None)
    entry = card("1")
    unsigned = attrs.evolve(entry, value=Unsigned("it has no signature", entry.value))
    survey.models, survey.refused = look_at_models([unsigned])
    (found,) = cluster_findings(survey)
    assert (found.what, found.verdict) == ("signatures", FindingVerdict.WARNING)
    assert found.text == "models/m/1: it has no signature"
    assert "secret_file" in found.remedy
    assert "delete it" in found.remedy


def test_doctor_warns_of_workers_whose_load_frontends_wait_for_in_vain() -> None:
    survey = surveyed()
    survey.instances = [
        attrs.evolve(instance(number), metadata=metadata)
        for number, metadata in enumerate(
            [{"model": "m"}, {"model": "m", "reports": "load"}, {"status": "http://1"}], start=0xA
        )
    ]
    (found,) = shedding_findings(survey, HttpConfig(busy_blocks=0.9))
    assert (found.verdict, found.text.split(": ")[-1]) == (FindingVerdict.WARNING, "a")
    assert not list(shedding_findings(survey, HttpConfig()))


@pytest.mark.parametrize(
    "junk",
    [None, 3, [], {"held": 1}, {"held": [{}]}, {"held": [{**HELD, "byte_count": -1}]}],
)
def test_nonsense_about_files_is_passed_over(junk: Any) -> None:
    rows = weights_rows([("1", {"weights": junk}), ("2", {"weights": {"held": [HELD]}})])
    assert [row.instance_id for row in rows] == ["2"]


def test_doctor_says_who_cannot_be_reached_where_and_why() -> None:
    """A cluster whose models are listed may answer nobody all the same."""
    survey = Survey(etcd="etcd", cluster=None, frontend=None)
    assert [each.verdict for each in reach_findings(survey)] == [FindingVerdict.GOOD]
    why = "instance 1 of a/b/c does not answer: cannot be reached at vm:35673: Connection refused"
    survey.away.append(why)
    survey.frontends.append(FrontendLook("frontend", 0, "http://f:80", "", wants_key=True))
    reach, key = reach_findings(survey)
    assert (reach.verdict, reach.text) == (FindingVerdict.WARNING, why)
    assert "data_plane.tcp.advertise_host" in reach.remedy
    assert (key.verdict, key.remedy) == (FindingVerdict.NOTE, "trinamo doctor --key-env NAME")
    assert "http://f:80 wants a key (401)" in key.text
