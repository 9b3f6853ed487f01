"""Programs that people point at such a server, unpatched, against a cluster with the shipped model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeAlias

import pytest

from tests.cli.places import Place, RunningCluster, cluster
from tests.clients.page import write_page
from tests.clients.programs import Outcome, Program, chosen, install
from tests.needs import A_MODEL, A_PROGRAM
from trinamo.runtime.engines.llamacpp.model_file import missing_model

pytestmark = [
    A_MODEL.unless(missing_model() is None),
]

AT_ONCE: Final = 2
Running: TypeAlias = Mapping[Program, "Future[list[Outcome]]"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    programs = chosen(is_long=bool(metafunc.config.getoption("--all")))
    metafunc.parametrize("program", programs, ids=lambda program: program.name)


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """All that were chosen, two at once, each in a process and a folder of its own."""
    asked_for = [
        program
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
        if isinstance(program := item.callspec.params["program"], Program)
    ]
    lacking = install(asked_for)
    root = tmp_path_factory.mktemp("clients")
    # One thread, as a second one would wait for the programs at every step.
    with (
        cluster(Place(root), "--workers", "2", "--set", "worker.threads=1") as server,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        told = variables(server)
        asked = {
            each: pool.submit(each.run, told, root / f"program{number}")
            for number, each in enumerate(asked_for)
            if each.environment not in lacking
        }
        yield asked
        if len(asked_for) == len(chosen(is_long=True)):
            write_page({each: future.result() for each, future in asked.items()}, lacking)


def variables(server: RunningCluster) -> dict[str, str]:
    """What scripts are told of the cluster; where its servers are is in its run file."""
    (path,) = (server.place.root / "run").rglob("*.json")
    record = json.loads(path.read_text("utf-8"))
    return {
        "CLIENTS_SERVER": server.url,
        "CLIENTS_ETCD": record["etcd"][0],
        "CLIENTS_NATS": record["nats"][0],
        "CLIENTS_NATS_TOKEN": record["settings"]["event_plane.nats.token"],
    }


def test_it_works_unpatched(program: Program, running: Running) -> None:
    if program not in running:
        A_PROGRAM.lacking()
    outcomes = running[program].result()

    assert outcomes
    failed = [f"{each.tried}: {each.failed}" for each in outcomes if each.failed]
    assert not failed, "\n".join(["", *failed])
