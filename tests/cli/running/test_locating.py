"""Which cluster a command means when none is named."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from trinamo.cli.options import Sources
from trinamo.cli.running.locating import join, locate
from trinamo.cli.up.cluster import shared_settings
from trinamo.cli.up.plan import plan_cluster
from trinamo.runtime.config.config import Config
from trinamo.runtime.config.keys import Secret
from trinamo.runtime.errors import ConfigError
from trinamo.transports.assembly.run_file import RunFile, process_started, running_config


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything below a folder of the test's own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def younger() -> Iterator[int]:
    """The pid of a process that started after this one."""
    with subprocess.Popen(["sleep", "60"]) as child:
        yield child.pid
        child.kill()


def write_run(pid: int, port: int, *, state: str = "ready") -> RunFile:
    etcd, nats = f"unix:/trinamo-{port}", f"nats://127.0.0.1:{port + 2}"
    run = RunFile(
        pid=pid,
        started=process_started(pid) or 0,
        state=state,
        url=f"http://127.0.0.1:{port}",
        etcd=(etcd,),
        nats=(nats,),
        settings={
            "control_plane.etcd.endpoints": etcd,
            "event_plane.nats.servers": nats,
            "event_plane.nats.token": f"token-{port}",
            "security.secret_file": f"/secret-{port}",
        },
    )
    run.write()
    return run


SOURCES = Sources(None, None, {})


def test_the_only_cluster_is_meant_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(os.getpid(), 1000)
    target = locate(SOURCES)
    assert target.run == run
    assert target.config.control_plane.etcd.endpoints == run.etcd
    assert target.config.event_plane.nats.token == Secret("token-1000")
    assert capsys.readouterr() == ("", "")


def test_of_several_the_newest_is_meant_and_the_others_are_named(
    younger: int, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = write_run(os.getpid(), 1000), write_run(younger, 2000)
    assert locate(SOURCES).run == new
    out, told = capsys.readouterr()
    assert out == ""
    assert "2 clusters run here" in told
    assert f"the newest, pid {new.pid}, {new.url}" in told
    assert f"pid {old.pid}, {old.url}: --etcd {old.etcd[0]}; chat: --url {old.url}\n" in told


@pytest.mark.parametrize("plane", ["control_plane__etcd__endpoints", "event_plane__nats__servers"])
def test_a_cluster_that_runs_here_is_named_by_either_of_its_servers(
    younger: int, capsys: pytest.CaptureFixture[str], plane: str
) -> None:
    """Its token comes along, which nobody types."""
    old, _ = write_run(os.getpid(), 1000), write_run(younger, 2000)
    target = locate(SOURCES.with_overrides(**{plane: old.etcd if "etcd" in plane else old.nats}))
    assert target.run == old
    assert target.config.control_plane.etcd.endpoints == old.etcd
    assert target.config.event_plane.nats.token == Secret("token-1000")
    assert capsys.readouterr().err == ""


def test_of_clusters_that_share_an_etcd_the_one_with_the_prefix_is_meant(
    younger: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the newest: its prefix would go before that of the environment."""
    shared = {"control_plane.etcd.endpoints": "10.0.0.5:2379"}
    runs = {}
    for pid, prefix in ((os.getpid(), "team-a/"), (younger, "team-b/")):
        runs[prefix] = run = attrs.evolve(
            write_run(pid, 1000),
            etcd=("10.0.0.5:2379",),
            settings=shared | {"control_plane.etcd.key_prefix": prefix},
        )
        run.write()
    with pytest.raises(ConfigError, match="key_prefix=team-a/;"):
        join(SOURCES)
    monkeypatch.setenv("TRINAMO_CONTROL_PLANE__ETCD__KEY_PREFIX", "team-a/")
    target = locate(SOURCES)
    assert target.run == runs["team-a/"]
    assert target.config.control_plane.etcd.key_prefix == "team-a/"
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TRINAMO_CONTROL_PLANE__ETCD__KEY_PREFIX", "team-c/")
    assert locate(Sources(overrides=shared)).run is None


def test_servers_of_somebody_s_own_are_meant_alone() -> None:
    write_run(os.getpid(), 1000)
    named = SOURCES.with_overrides(control_plane__etcd__endpoints="127.0.0.1:1")
    target = locate(named)
    assert target.is_named
    assert target.run is None
    assert target.config.event_plane.nats.token is None


def test_a_process_joins_the_cluster_that_runs_beside_it() -> None:
    run = write_run(os.getpid(), 1000)
    sources, told = join(SOURCES.with_overrides(worker__engine="echo"))
    config = sources.load()
    assert told == f"joins the cluster of `trinamo up`, pid {run.pid}, {run.url}"
    assert config.worker.engine == "echo"
    assert config.control_plane.etcd.endpoints == run.etcd
    assert config.event_plane.nats.token == Secret("token-1000")
    assert config.security.secret_file == "/secret-1000"


def test_the_file_of_a_cluster_counts_as_it_was_at_the_start(tmp_path: Path) -> None:
    """An edit is for the next start; till then it must not turn commands to another place."""
    file = tmp_path / "cluster.yaml"
    file.write_text("http: {port: 1000, lame_duck_s: 7}\nrouter: {inhibit_s: 3}\n")
    plan = plan_cluster(Sources(file, overrides={"worker.engine": "echo"}))
    attrs.evolve(write_run(os.getpid(), 1000), configured=plan.sources.defaults).write()
    for text in ("http: {port: 2000}", "http: {prot: 2000}", "http: ["):
        file.write_text(text)
        for config in (plan.sources.load(), locate(SOURCES).config, join(SOURCES)[0].load()):
            assert (config.http.port, config.http.lame_duck_s) == (1000, 7)
            assert config.router.inhibit_s == 3
        assert running_config().http.port == 1000


def test_who_has_a_file_of_its_own_has_nothing_of_the_cluster_s(tmp_path: Path) -> None:
    run = attrs.evolve(write_run(os.getpid(), 1000), configured={"http.port": 1000})
    run.write()
    file = tmp_path / "own.yaml"
    file.write_text("router: {inhibit_s: 3}\n")
    config = locate(Sources(file)).config
    assert (config.http.port, config.router.inhibit_s) == (Config().http.port, 3)
    assert config.control_plane.etcd.endpoints == run.etcd


@pytest.mark.parametrize(
    "overrides",
    [
        {"control_plane.etcd.endpoints": "127.0.0.1:1"},
        {"control_plane.backend": "memory"},
        {"control_plane.embedded": True},
    ],
)
def test_a_process_that_has_a_store_of_its_own_joins_nothing(overrides: dict[str, object]) -> None:
    write_run(os.getpid(), 1000)
    sources = Sources(overrides=overrides)
    assert join(sources) == (sources, "")


def test_a_cluster_that_is_ending_is_not_joined() -> None:
    write_run(os.getpid(), 1000, state="draining")
    assert join(SOURCES) == (SOURCES, "")


def test_of_several_clusters_the_one_to_join_must_be_named(younger: int) -> None:
    old, new = write_run(os.getpid(), 1000), write_run(younger, 2000)
    with pytest.raises(ConfigError, match="2 clusters run here; name the one to join") as caught:
        join(SOURCES)
    assert all(f"--etcd {run.etcd[0]}" in caught.value.message for run in (old, new))
    sources, told = join(SOURCES.with_overrides(control_plane__etcd__endpoints=old.etcd))
    assert f"pid {old.pid}" in told
    assert sources.load().security.secret_file == "/secret-1000"


def test_what_is_shared_is_what_was_said_of_the_shared_sections() -> None:
    overrides = {
        "control_plane.etcd.endpoints": "a:1,b:2",
        "control_plane.etcd.username": "u",
        "control_plane.etcd.password": "p",
        "control_plane.etcd.tls.enabled": True,
        "control_plane.etcd.data_dir": "/mine",
        "http.port": 1,
        "data_plane.requests": "nats",
        "security.secret_file": "cluster.secret",
    }
    assert shared_settings(Sources(overrides=overrides).load()) == {
        "control_plane.etcd.endpoints": "a:1,b:2",
        "control_plane.etcd.username": "u",
        "control_plane.etcd.password": "p",
        "control_plane.etcd.tls.enabled": "true",
        "data_plane.requests": "nats",
        # Who looks may be in another folder.
        "security.secret_file": str(Path("cluster.secret").absolute()),
    }
