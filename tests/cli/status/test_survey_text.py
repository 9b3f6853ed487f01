"""What a survey looks like for people."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from trinamo.cli.status.text import survey_json, survey_tables
from trinamo.runtime.view.listing import InstanceLook
from trinamo.runtime.view.rows import SINGLY_MAX
from trinamo.runtime.view.survey import Survey


def surveyed(health: dict[str, Any] | None) -> Survey:
    look = InstanceLook(
        endpoint="trinamo/backend/generate",
        id="feed",
        lease_id="1f",
        incarnation=1,
        is_draining=False,
        transports={},
        metadata={},
        health=health,
    )
    return Survey(etcd="etcd", cluster=None, frontend=None, instances=[look])


def shown(survey: Survey, width: int = 160, *, each: bool = False) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        for part in survey_tables(survey, width, each=each):
            console.print(part)
    return capture.get()


def backend(name: str, **more: Any) -> dict[str, Any]:
    facts = {"is_open": True, "peers": 2, "usable_peers": 2, "in_flight": 0, "problem": ""}
    return {"backend": name, **facts, **more}


def test_the_chain_of_a_worker_is_shown_with_the_switch_and_its_reason() -> None:
    chain = [
        backend("nixl", usable_peers=1, problem="[peer] 1f2e hung up"),
        backend("mooncake", is_open=False, peers=0, usable_peers=0, problem="not installed"),
        backend("tcp", in_flight=3),
    ]
    transfers = {"chain": chain, "peers": 2, "fallbacks": 4, "quarantined_blocks": 5}
    survey = surveyed({"status": "ready", "active": 1, "transfers": transfers})
    lines = [line.split() for line in shown(survey).splitlines()]
    rows = [line for line in lines if {"nixl", "mooncake", "tcp"} & set(line)]
    assert rows == [
        ["feed", "nixl", "open:", "[peer]", "1f2e", "hung", "up", *["1", "of", "2", "0", "4", "5"]],
        ["mooncake", "not", "open:", "not", "installed", *["0", "of", "0", "0"]],
        ["tcp", "open", *["2", "of", "2", "3"]],
    ]
    assert '"fallbacks": 4' in survey_json(survey)


def test_the_blocks_of_a_worker_are_shown_as_used_of_all() -> None:
    assert " 12/512 " in shown(surveyed({"active": 1, "blocks": {"used": 12, "total": 512}}))


@pytest.mark.parametrize(
    "health",
    [
        None,
        {"blocks": [1, 2]},
        {"blocks": {"used": {}}},
        {"transfers": 7},
        {"transfers": {"chain": 7}},
        {"transfers": {"chain": [7, {}, {"backend": 7, "peers": "many"}]}},
    ],
)
def test_what_a_stranger_says_of_itself_does_no_harm(health: dict[str, Any] | None) -> None:
    assert "feed" in shown(surveyed(health))


@pytest.mark.parametrize("width", [80, 120, 160, 400])
def test_an_id_is_in_one_piece_however_narrow_the_terminal_is(width: int) -> None:
    """`grep` and the mouse find it; what nobody copies gives way: lease and address first."""
    survey = surveyed({"status": "ready", "transfers": {"chain": [backend("tcp")]}})
    [look] = survey.instances
    look.id, look.name, look.lease_id = "0273d40327fd0d0f", "worker-1", "694da2090085461e"
    look.transports = {"tcp": "10.77.0.1:36951"}
    look.metadata = {"model": "SmolLM2-135M-Instruct", "engine": "llamacpp", "pid": "12345"}
    lines = shown(survey, width).splitlines()

    assert len([line for line in lines if look.id in line]) == 2
    (row,) = [line for line in lines if look.id in line and "worker-1" in line]
    assert {"SmolLM2-135M-Instruct", "ready", "12345"} <= set(row.split())
    assert (look.lease_id in row, "10.77.0.1:36951" in row) == (width > 200, width > 150)


def fleet(count: int) -> Survey:
    """Every fourth computes prompts; one drains, one does not answer, and half are of an older build."""
    survey = surveyed(None)
    survey.instances = [
        InstanceLook(
            endpoint="trinamo/backend/generate",
            id=f"{number:016x}",
            lease_id="1f",
            incarnation=1,
            is_draining=number == 1,
            transports={"tcp": "10.0.0.1:1"},
            metadata={"model": "m", "role": "decode" if number % 4 else "prefill"},
            health={
                "status": "ready",
                "active": 3,
                "engines": {"m": {"running": 2, "waiting": 1, "blocks_used": 1, "blocks_free": 3}},
            },
            problem="it does not say why" if number == 2 else "",
            build="0.2.0" if number % 2 else "0.1.0",
        )
        for number in range(count)
    ]
    return survey


def test_a_large_cluster_is_shown_by_model_and_role_and_what_is_wrong_singly() -> None:
    survey = fleet(1000)
    text = shown(survey)
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert (
        "m decode 750 748 ready, 1 draining, 1 away 2250 750 750/3000 500 of 0.2.0, 250 of 0.1.0"
        in rows
    )
    assert "m prefill 250 250 ready 750 250 250/1000 250 of 0.1.0" in rows
    assert [each for each in survey.instances if each.id in text] == survey.instances[1:3]
    assert "998 instances are not shown one by one: --instances does" in text
    assert len(rows) < 40
    every = shown(survey, each=True)
    assert all(each.id in every for each in survey.instances)
    assert "by model and role" not in every


def test_a_small_cluster_is_shown_instance_by_instance() -> None:
    text = shown(fleet(SINGLY_MAX))
    assert text.count("0000000000") == SINGLY_MAX
    assert "by model and role" not in text


def test_of_many_with_whom_something_is_wrong_those_that_do_not_answer_come_first() -> None:
    survey = fleet(1000)
    for look in survey.instances[10:]:
        look.is_draining = True
    survey.instances[-1].problem = "it does not say why"
    text = shown(survey)
    assert text.count("0000000000") == SINGLY_MAX
    assert survey.instances[-1].id in text


def test_refusals_for_one_reason_are_one_line_with_their_number() -> None:
    survey = surveyed(None)
    survey.refused = [f"instances/a/b/c/{n:x}: it has no signature" for n in range(500)]
    survey.refused.append("alias 's' of 'other' is refused: it means 'small'")
    refused = [each for each in shown(survey).splitlines() if each.startswith("refused")]
    assert refused == [
        "refused: instances/a/b/c/0: it has no signature; and 499 more likewise",
        "refused: alias 's' of 'other' is refused: it means 'small'",
    ]
