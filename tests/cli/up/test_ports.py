"""`trinamo up --etcd-port --nats-port`: servers that programs of others reach."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import trio

from tests.cli.places import Place, RunningCluster, cluster, wait_for
from trinamo.cli.children.shared_port import reserved_port
from trinamo.cli.options import Sources
from trinamo.cli.up.cluster import ending_signals, shared_settings, welcome
from trinamo.cli.up.plan import plan_cluster
from trinamo.runtime.config.keys import Secret
from trinamo.runtime.config.planes import NatsConfig
from trinamo.runtime.errors import ConfigError, ConnectError
from trinamo.transports.nats import open_nats


def fixed_port() -> int:
    """A free port that no connection of this machine is given by chance."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


@attrs.frozen
class Ports:
    etcd: int
    nats: int
    running: RunningCluster

    @property
    def token(self) -> str:
        """As the line of `up` has it read."""
        place = self.running.place.output.partition("NATS_USER=$(cat ")[2].partition(")")[0]
        return Path(place).read_text()


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    etcd, nats = fixed_port(), fixed_port()
    place = Place(tmp_path_factory.mktemp("ports"))
    options = (f"--etcd-port={etcd}", f"--nats-port={nats}", "--workers=1", "--engine=echo")
    with cluster(place, *options) as running:
        yield Ports(etcd, nats, running)


def etcdctl(*arguments: str) -> str:
    tool = Path(sys.executable).with_name("etcdctl")
    done = subprocess.run(
        [tool, *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


class TestOfOneCluster:
    def test_a_stranger_s_client_reads_what_up_says(self, ports: Ports) -> None:
        assert f"etcdctl --endpoints 127.0.0.1:{ports.etcd} get" in ports.running.place.output

        keys = etcdctl(
            *(f"--endpoints=127.0.0.1:{ports.etcd}", "get", "", "--prefix", "--keys-only")
        )

        assert "instances/trinamo/backend/generate/" in keys

    async def test_nats_asks_for_the_token_of_the_file(self, ports: Ports) -> None:
        url = f"nats://127.0.0.1:{ports.nats}"
        with pytest.raises(ConnectError, match="Authorization"):
            async with open_nats(url, NatsConfig()):
                pass
        async with open_nats(url, NatsConfig(token=Secret(ports.token))) as plane:
            await plane.check_health()
        assert ports.token not in ports.running.place.output

    async def test_etcd_has_no_gateway_for_pages_of_a_browser(self, ports: Ports) -> None:
        body = b'{"key": "YQ==", "value": "YQ=="}'
        head = b"POST /v3/kv/put HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
        async with await trio.open_tcp_stream("127.0.0.1", ports.etcd) as stream:
            await stream.send_all(head + body)
            answer = b"".join([part async for part in stream])
        assert answer.startswith(b"HTTP/1.0 404 ")

    def test_commands_find_it_by_either_address(self, ports: Ports) -> None:
        place = ports.running.place
        for options in (
            ("status", "--etcd", f"localhost:{ports.etcd}"),
            ("config", "get", "log.level", "--etcd", f"127.0.0.1:{ports.etcd}"),
            ("queue", "ls", "--nats", f"nats://localhost:{ports.nats}"),
            ("status",),
        ):
            done = place.run(*options)
            assert done.returncode == 0, (options, done.stderr)

    def test_a_worker_joins_by_the_command_that_up_prints(self, ports: Ports) -> None:
        place = ports.running.place
        line = next(each for each in place.output.splitlines() if "one more worker" in each)
        command = line.partition(": trinamo ")[2].split()
        assert command[:3] == ["worker", "--etcd", f"127.0.0.1:{ports.etcd}"]
        beside = attrs.evolve(place, root=place.root / "beside", extra=_folders(place))
        beside.environ  # noqa: B018 -- makes its folders
        process = beside.start(*command, "--model-name", "second")
        try:
            models = f"models of the cluster at 127.0.0.1:{ports.etcd}"
            wait_for(lambda: "second" in place.run("status", "--json").stdout, 60, models)
        finally:
            process.terminate()
            assert process.wait(120) == 0, beside.output

    def test_a_port_in_use_is_one_sentence_that_names_the_option(self, ports: Ports) -> None:
        for option, port in (("--etcd-port", ports.etcd), ("--nats-port", ports.nats)):
            done = ports.running.place.run("up", "--port", "0", option, str(port))
            assert done.returncode == 2
            assert f"port {port}" in done.stderr
            assert f"choose another with {option}" in done.stderr
            assert len(done.stderr.splitlines()) == 1


def _folders(place: Place) -> dict[str, str]:
    """So that a process that runs in a folder of its own finds the clusters of `place`."""
    return {name: place.environ[name] for name in ("TMPDIR", "XDG_RUNTIME_DIR")}


def plan(**settings: object) -> None:
    sources = Sources().with_overrides(worker__engine="echo", **settings)
    plan_cluster(sources, workers=1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"control_plane__etcd__port": 4001, "control_plane__etcd__endpoints": "10.0.0.5:2379"},
            "control_plane.etcd.port is 4001, but no server of ours is started",
        ),
        (
            {"event_plane__nats__port": 4001, "event_plane__nats__servers": "nats://10.0.0.5"},
            "event_plane.nats.port is 4001, but no server of ours is started",
        ),
        (
            {"control_plane__etcd__port": 4001, "event_plane__nats__port": 4001},
            "port 4001 is to be that of two servers",
        ),
        ({"control_plane__etcd__port": 8787}, "port 8787 is to be that of two servers"),
    ],
)
def test_ports_that_mean_nothing_are_refused(
    settings: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("TRINAMO_")]:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=words):
        plan(**settings)


def test_the_ports_of_servers_are_not_handed_to_who_joins() -> None:
    """A second server there would be a second cluster."""
    sources = Sources().with_overrides(
        control_plane__etcd__port=4001, event_plane__nats__port=4002, worker__engine="echo"
    )
    assert not [key for key in shared_settings(sources.load()) if key.endswith(".port")]


def test_where_clients_need_keys_the_printed_commands_send_one() -> None:
    plain = Sources().with_overrides(worker__engine="echo")
    keyed = plain.with_overrides(http__api_key_env="KEY")
    lines = {
        needs_key: "\n".join(welcome("http://127.0.0.1:1", "", plan_cluster(each, workers=1), {}))
        for needs_key, each in ((False, plain), (True, keyed))
    }

    assert "Bearer" not in lines[False]
    assert ' -H "authorization: Bearer $KEY"' in lines[True]
    assert 'trinamo chat --key-env KEY "' in lines[True]


def test_a_cluster_that_nohup_has_started_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert ending_signals() == {signal.SIGINT, signal.SIGTERM}
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert ending_signals() == {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_port_that_one_frontend_had_alone_is_free_for_several_at_once() -> None:
    """Its last connections linger for a minute. Held, it is nobody else's."""
    with socket.create_server(("127.0.0.1", 0)) as alone:
        port = alone.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            alone.accept()[0].close()
            assert client.recv(1) == b""

    with (
        reserved_port("127.0.0.1", port) as held,
        pytest.raises(OSError, match="in use"),
        socket.create_server(("127.0.0.1", held)),
    ):
        pass
