"""`trinamo up --disagg` as its user sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.cli.places import Place, RunningCluster, cluster


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    place = Place(tmp_path_factory.mktemp("disaggregated"))
    small = "disaggregation.prefill_tokens_local_max=64"
    options = ("--engine", "exact", "--disagg", "--prefill", "1", "--decode", "1")
    with cluster(place, *options, "--set", small) as found:
        yield found


def test_blocks_move_while_a_long_prompt_is_answered(running: RunningCluster) -> None:
    body = {"messages": [{"role": "user", "content": "a long story " * 20}], "max_tokens": 8}
    request = Request(
        f"{running.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urlopen(request, timeout=120) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 8

    found = json.loads(running.place.run("status", "--json").stdout)
    roles = {each["metadata"]["role"]: each for each in found["instances"]}
    assert set(roles) == {"prefill", "decode"}
    assert roles["decode"]["health"]["disaggregation"]["prefills"] == {"long_prompt": 1}
    assert roles["prefill"]["health"]["disaggregation"]["jobs"] == {"done": 1}
    assert [(each["name"], each["instances"]) for each in found["models"]] == [("exact", 1)]


def test_the_table_for_people_names_the_roles(running: RunningCluster) -> None:
    shown = running.place.run("status").stdout

    assert "role" in shown
    assert "prefill" in shown
    assert "decode" in shown


def test_the_children_are_called_by_their_roles(running: RunningCluster) -> None:
    lines = sorted(line for line in running.children.values() if " worker " in line)

    assert ["--role decode" in line or "--role prefill" in line for line in lines] == [True, True]
    assert "prefill-1" in running.place.output
    assert "decode-1" in running.place.output


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--disagg", "--engine", "echo"], "the engine echo has none"),
        (["--disagg", "--workers", "3"], "say how many by --prefill and --decode"),
        (["--prefill", "2"], "need --disagg"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(
    tmp_path: Path, options: list[str], sentence: str
) -> None:
    done = Place(tmp_path).run("up", *options)

    assert done.returncode != 0
    assert sentence in " ".join(done.stderr.replace("│", " ").split())
