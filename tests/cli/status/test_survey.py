"""What `trinamo status` makes of a cluster whose etcd is away: the frontend's last word."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from attrs import evolve
from rich.console import Console

from trinamo.cli.running.locating import Target
from trinamo.cli.status.asking import _dialling, is_alone, survey_cluster
from trinamo.cli.status.text import survey_json, survey_tables
from trinamo.runtime.config.config import load_config
from trinamo.runtime.config.http import HttpConfig
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import ConnectError, UnavailableError
from trinamo.runtime.http.metrics import FrontendMetrics
from trinamo.runtime.http.service import HttpService
from trinamo.runtime.planes import ControlStatistics, EventStatistics
from trinamo.runtime.protocol.discovery.instances import FrontendEntry
from trinamo.runtime.view.listing import InstanceLook, ModelLook
from trinamo.runtime.view.overview import FrontendView, InstanceView, Overview
from trinamo.runtime.view.rows import SINGLY_MAX
from trinamo.runtime.view.survey import (
    TOLD_MAX,
    Asking,
    FrontendLook,
    Survey,
    add_listed,
    ask_frontends,
    ask_instances,
    ask_processes,
    tell_frontends,
)
from trinamo.transports.assembly.http import Http
from trinamo.transports.assembly.run_file import ProcessEntry
from trinamo.transports.openai.client import fetch
from trinamo.transports.servers.binaries import free_port

NATS = "nats://127.0.0.1:4"


def seen(
    *states: str, has_etcd: bool = False, has_nats: bool = True, left_out: int = 0
) -> Overview:
    return Overview(
        control=ControlStatistics(
            is_connected=has_etcd, watches=3, stream_losses=1, resyncs=0, silence_s=12.4
        ),
        events=EventStatistics(
            is_connected=has_nats,
            connections=1,
            waiting_messages=7,
            dropped_outgoing=2,
            dropped_incoming=0,
        ),
        instances=[
            InstanceView(
                endpoint="a/b/c",
                id=f"{number:x}",
                state=state,
                in_flight=number,
                incarnation=1,
                model="[m]",
                engine="echo",
            )
            for number, state in enumerate(states)
        ],
        instances_left_out=left_out,
    )


@asynccontextmanager
async def frontend(overview: Overview, **settings: Any) -> AsyncIterator[str]:
    """The address of a frontend that knows this."""
    env = RealEnv()
    section = msgspec.convert({"port": 0, **settings}, HttpConfig)
    service = HttpService(section, env, FrontendMetrics(env), Http(), lambda: overview)
    async with trio.open_nursery() as nursery:
        port = await nursery.start(service.run)
        yield f"http://127.0.0.1:{port}"
        service.stop()


def target(**more: str) -> Target:
    """A cluster whose etcd refuses connections."""
    overrides = {
        "control_plane.etcd.endpoints": f"127.0.0.1:{free_port()}",
        "control_plane.etcd.request_timeout_s": 0.2,
        "control_plane.etcd.attempt_timeout_s": 0.1,
        "control_plane.etcd.connect_timeout_s": 0.1,
        "event_plane.nats.servers": NATS,
        **more,
    }
    return Target(load_config(environ={}, overrides=overrides), None, is_named=True)


def text_of(survey: Survey) -> str:
    console = Console(width=200, highlight=False, markup=False)
    with console.capture() as captured:
        for part in survey_tables(survey):
            console.print(part)
    return captured.get()


async def test_a_frontend_that_wants_a_key_is_not_away(tmp_path: Path) -> None:
    """Only how it is can be asked without one."""
    (tmp_path / "keys").write_text("root (operator): sk-0123456789", "utf-8")
    async with frontend(seen("live"), api_keys_file=str(tmp_path / "keys")) as url:
        look = FrontendLook("frontend", 0, url, "", is_named=True)
        survey = Survey(etcd="", cluster=None, frontend=None, frontends=[look])
        await ask_frontends(survey.frontends, Asking(fetch))
        assert tell_frontends(survey) == []
        with pytest.raises(ConnectError, match=f"{url} wants a key: --key-env"):
            await survey_cluster(target(), url=url)
        known = await survey_cluster(target(), url=url, key="sk-0123456789")

    assert survey.frontend == {"url": url, "status": "unavailable", "in_flight": 0}
    assert survey.away == []
    assert known.instances


async def test_of_a_frontend_in_front_of_upstreams_no_other_cluster_is_looked_at() -> None:
    """Whatever etcd the command would find here is another cluster's."""
    known = msgspec.structs.replace(seen("live", "away"), control=None)
    nobody = Target(load_config(environ={}), None, is_named=False)
    async with frontend(known) as url:
        assert await is_alone(nobody.config, url)
        # The control plane of a package need not count.
        package = load_config(environ={}, overrides={"control_plane.backend": "sqlite"})
        assert not await is_alone(package, url)
        survey = await survey_cluster(nobody, url=url, timeout_s=60)

    assert survey.etcd == ""
    assert [each.seen for each in survey.instances] == ["live", "away"]
    assert not any("etcd" in each for each in survey.away)
    async with frontend(seen("live")) as url:
        assert not await is_alone(nobody.config, url)


def test_a_frontend_and_an_instance_are_shown_with_the_machine_they_are_on() -> None:
    looks = [FrontendLook("frontend", 0, "http://0.0.0.0:8787", "http://10.0.0.1:9090")]
    add_listed(
        looks,
        [
            FrontendEntry(
                id="1", url="http://10.0.0.1:8787", status="http://10.0.0.1:9090", host="alpha"
            ),
            FrontendEntry(
                id="2", url="http://10.0.0.2:8787", status="http://10.0.0.2:9090", host="beta"
            ),
        ],
    )
    survey = Survey(etcd="", cluster=None, frontend=None, frontends=looks)
    survey.instances = [
        evolve(look(""), id=name, metadata={"model": "m", "host": name})
        for name in ("alpha", "beta")
    ]
    text = text_of(survey)

    assert "frontend on alpha: http://10.0.0.1:8787" in text
    assert "on beta: http://10.0.0.2:8787" in text
    assert "0.0.0.0" not in text
    assert "host" in text
    survey.instances = survey.instances[:1]
    assert "host" not in text_of(survey)


async def test_the_frontend_is_believed_while_etcd_is_away() -> None:
    async with frontend(seen("live", "connection lost", left_out=3)) as url:
        survey = await survey_cluster(target(), url=url)

    assert survey.is_last_known
    assert [(each.seen, each.in_flight) for each in survey.instances] == [
        ("live", 0),
        ("connection lost", 1),
    ]
    text = text_of(survey)
    assert "does not answer; this is what the frontend last knew, 12 s ago" in text
    assert "connection lost" in text
    assert "[m]" in text
    assert "3 more instances are not listed" in text
    assert json.loads(survey_json(survey))["frontend"]["control"]["stream_losses"] == 1


async def test_who_looks_need_not_have_the_cluster_s_secret() -> None:
    """An operator has the configuration, and no right to read what the processes prove themselves with."""
    async with frontend(seen("live")) as url:
        survey = await survey_cluster(target(**{"security.secret_file": "/no/such/file"}), url=url)
    assert [each.id for each in survey.instances] == ["0"]


async def test_a_frontend_before_upstreams_has_no_etcd_that_could_be_away() -> None:
    known = seen("live", "away")
    known = msgspec.structs.replace(known, control=None)
    async with frontend(known) as url:
        survey = await survey_cluster(target(), url=url)

    assert not survey.is_last_known
    away, nobody = survey.away
    assert away.startswith("instance 1 of a/b/c does not answer: the upstream fails its looks")
    # The service of this test has no model.
    assert nobody.startswith("the frontend knows no live instance")
    assert "etcd" not in text_of(survey)


async def test_names_and_load_of_those_that_cannot_be_asked_are_shown() -> None:
    survey = Survey(etcd="", cluster=None, frontend=None)
    survey.instances = [
        InstanceLook(
            endpoint="a/b/c", id="1", lease_id="", incarnation=1, is_draining=False,
            transports={}, metadata={}, name="10.0.0.1:8000", active=7, kv_used=0.25, in_flight=2,
        )
    ]  # fmt: skip
    (row,) = [line for line in text_of(survey).splitlines() if "10.0.0.1:8000" in line]
    assert {"7", "25%"} <= set(row.split())


async def test_an_etcd_that_only_we_cannot_reach_is_told_so() -> None:
    async with frontend(seen("live", has_etcd=True)) as url:
        survey = await survey_cluster(target(), url=url)

    away, nobody = survey.away
    assert away.endswith("does not answer from here; this is what the frontend knows")
    # The service of this test has no model.
    assert nobody.startswith("the frontend knows no live instance")


async def test_workers_that_etcd_has_forgotten_are_told() -> None:
    async with frontend(seen("live", "stale", "stale")) as url:
        survey = await survey_cluster(target(), url=url)

    assert "2 of 3 instances are no longer in etcd" in text_of(survey)
    assert [each.seen for each in survey.instances] == ["live", "stale", "stale"]


async def test_a_frontend_without_nats_says_what_waits() -> None:
    async with frontend(seen("live", has_nats=False)) as url:
        survey = await survey_cluster(target(), url=url)

    assert f"NATS at {NATS} does not answer the frontend: 7 messages wait" in survey.away[-1]
    assert "not connected to NATS" in text_of(survey)


@pytest.mark.parametrize(
    "url",
    [
        "http://" + "a" * 70 + ":80",
        "http://" + "a" * 100_000,
        "http://127.0.0.1:99999",
        "http://[::1%25\x00]:80",
        "http://\ud800",
        "http://127.0.0.1:1/\x1b[2J",
        "not at all",
    ],
)
async def test_a_status_address_that_makes_no_sense_is_an_instance_that_is_away(url: str) -> None:
    survey = Survey(etcd="etcd", cluster=None, frontend=None)
    survey.instances = [look(url)]
    survey.models = [ModelLook("m", "a/b/c", "echo", 64, registered=1)]
    await ask_instances(survey, Asking(fetch))

    (away,) = survey.away
    assert away.startswith("instance 1 of a/b/c does not answer")
    assert survey.models[0].instances == 0
    assert "\x1b" not in text_of(survey)
    assert all(len(line) < 1500 for line in text_of(survey).splitlines())


async def test_silent_instances_without_number_are_counted() -> None:
    survey = Survey(etcd="etcd", cluster=None, frontend=None)
    survey.instances = [look("nowhere") for _ in range(300)]
    await ask_instances(survey, Asking(fetch))

    assert len(survey.away) == TOLD_MAX + 1
    assert survey.away[-1] == f"{300 - TOLD_MAX} more instances do not answer"
    text = text_of(survey)
    assert "300 away" in text
    assert f"{300 - SINGLY_MAX} instances are not shown one by one" in text


async def test_a_cluster_that_nobody_serves_is_not_whole() -> None:
    survey = Survey(etcd="etcd", cluster=None, frontend=None)
    await ask_instances(survey, Asking(fetch))

    assert survey.away == ["no instance is registered: no request can be answered"]


async def test_a_worker_of_up_that_cannot_register_is_away() -> None:
    """Such as one started again while etcd's disk is full."""
    survey = Survey(etcd="etcd", cluster=None, frontend=None)
    survey.instances = [look("")]
    known = ProcessEntry("worker-1", 7, "")
    await ask_processes(
        survey, Asking(fetch), [known, ProcessEntry("worker-2", 8), ProcessEntry("worker-3", 0)]
    )

    assert survey.away == [
        "worker-2 of `trinamo up` is not registered; its log says why",
        "worker-3 of `trinamo up` does not run; its log says why",
    ]


def look(status_url: str) -> InstanceLook:
    return InstanceLook(
        endpoint="a/b/c",
        id="1",
        lease_id="1f",
        incarnation=1,
        is_draining=False,
        transports={"tcp": "127.0.0.1:1\x1b[2J"},
        metadata={"model": "m", "status": status_url, "pid": "7"},
    )


async def test_without_a_frontend_the_way_to_name_one_is_told() -> None:
    with pytest.raises(UnavailableError, match="--url"):
        await survey_cluster(target())


@pytest.mark.parametrize("answer", [b"{}", b"[1]", b'{"status": 1}', b"no json"])
async def test_what_is_no_frontend_is_not_believed(answer: bytes) -> None:
    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some(65_536)
            head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer)
            await stream.send_all(head + answer)

    async with trio.open_nursery() as nursery:
        serving = partial(trio.serve_tcp, host="127.0.0.1")
        (listener,) = await nursery.start(serving, serve, 0)
        port = listener.socket.getsockname()[1]
        with pytest.raises(ConnectError, match=r"etcd at .* does not answer; frontend at "):
            await survey_cluster(target(), url=f"http://127.0.0.1:{port}")
        nursery.cancel_scope.cancel()


async def test_an_instance_that_cannot_be_asked_is_away_if_the_frontend_has_lost_it() -> None:
    """It has no status port; discovery names it until its lease ends."""
    survey = Survey(etcd="etcd", cluster=None, frontend=None)
    survey.instances = [look("")]
    survey.models = [ModelLook("m", "a/b/c", "echo", 64, registered=1)]
    known = seen("live", "connection lost")
    view = FrontendView(status="ready", in_flight=1, models=[], cluster=known)
    await ask_instances(survey, Asking(fetch), [("the frontend", view)])

    (away,) = survey.away
    assert away == (
        "instance 1 of a/b/c does not answer: the frontend has lost its connection to it"
    )
    assert survey.models[0].instances == 0
    assert survey.instances[0].in_flight == 1


async def test_who_cannot_read_the_cluster_s_secret_takes_nobody_for_away() -> None:
    """A member hangs up on who does not know it, which says nothing of how requests come to it."""
    config = load_config(overrides={"security.secret_file": "/nowhere/secret"})
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]

    async def hang_up(stream: trio.SocketStream) -> None:
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, hang_up, [listener])
        for known, why in ((config, ""), (load_config(), "closed the connection")):
            async with _dialling(known) as dial:
                assert why in (told := await dial(f"127.0.0.1:{port}", "0123456789abcdef"))
                assert bool(told) == bool(why)
        nursery.cancel_scope.cancel()
