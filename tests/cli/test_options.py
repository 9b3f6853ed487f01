"""From options to one configuration, here and in the children."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main
from rich.text import Text

from trinamo.cli.children.readiness import parse_line
from trinamo.cli.completion import complete_engine
from trinamo.cli.main import app
from trinamo.cli.options import Sources, gather, place_of
from trinamo.cli.serve import engine as engine_module
from trinamo.cli.up import plan as plan_module
from trinamo.cli.up.plan import plan_cluster
from trinamo.runtime.config.config import load_config
from trinamo.runtime.config.keys import Secret
from trinamo.runtime.config.source import dump
from trinamo.runtime.engines.threads import Cores
from trinamo.runtime.errors import ConfigError


def test_an_option_that_was_not_given_is_left_out() -> None:
    assert gather([], http__port=None, http__host="::1") == {"http.host": "::1"}


def test_a_setting_may_hold_an_equals_sign() -> None:
    assert gather(["worker.model_name=a=b"]) == {"worker.model_name": "a=b"}


@pytest.mark.parametrize("setting", ["http.port", "=1", ""])
def test_a_setting_is_key_equals_value(setting: str) -> None:
    with pytest.raises(ConfigError, match="key=value"):
        gather([setting])


def test_children_get_the_same_configuration(tmp_path: Path) -> None:
    """By environment variables: no secret in a command line, and none changes with the file."""
    path = tmp_path / "c.yaml"
    path.write_text(
        "http:\n  port: 1\n  requests_max: 7\n"
        'worker:\n  models: ["a=exact;path=/x,y.gguf", "b=echo"]\n'
    )
    sources = Sources(
        path,
        "medium",
        gather(
            [
                "http.port=8080",
                "control_plane.etcd.username=u",
                "control_plane.etcd.password=p",
                "control_plane.etcd.tls.enabled=true",
            ],
            worker__status_port=0,
            event_plane__nats__servers="nats://a:1,nats://b:2",
        ),
    )
    environ, own = sources.environ(), sources.load()
    path.write_text("somebody: edits it\n")

    in_child = load_config(environ=environ)

    assert in_child == own
    assert in_child.http.port == 8080
    assert in_child.http.requests_max == 7


def test_what_the_file_has_left_as_it_was_is_not_taken_from_our_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRINAMO_HTTP__PORT", "1")
    monkeypatch.setenv("TRINAMO_PRESET", "medium")
    monkeypatch.setenv("TRINAMO_MODEL", "model.gguf")
    environ = Sources(overrides={"http.port": 8787}).environ()
    assert load_config(environ=environ).http.port == 8787
    assert environ["TRINAMO_MODEL"] == "model.gguf"
    assert "TRINAMO_PRESET" not in environ


def test_a_frontend_with_tls_is_asked_at_a_port_without() -> None:
    """Its certificate is for the name that clients know, and who asks here would not trust it."""
    overrides = {"http.tls.certificate_file": "c.pem", "http.tls.key_file": "k.pem"}
    for given, port in ((overrides, "0"), ({**overrides, "http.status_port": 9090}, "9090")):
        sources = Sources(overrides={"worker.engine": "echo", **given})
        environ = plan_cluster(sources, workers=1).child_environ(sources)
        assert environ["TRINAMO_HTTP__STATUS_PORT"] == port


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/"])
def test_a_frontend_is_named_as_clients_name_it_too(tail: str) -> None:
    """`trinamo up` prints the address that clients take, and that is what people copy."""
    assert place_of(f"http://127.0.0.1:8787{tail}") == "http://127.0.0.1:8787"
    assert place_of(None) == ""


def test_an_engine_that_cannot_run_is_refused_before_a_child_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sources = Sources(overrides={"worker.engine": "llamacpp"})
    monkeypatch.setitem(sys.modules, "cyllama", None)
    with pytest.raises(ConfigError, match=r"cyllama missing.*pip install 'trinamo\[llamacpp\]'"):
        plan_cluster(sources, workers=1)

    for module in ("cyllama", "jinja2"):
        monkeypatch.setitem(sys.modules, module, _installed(module))
    gone = sources.with_overrides(worker__model_path=str(tmp_path / "gone.gguf"))
    with pytest.raises(ConfigError, match=r"gone\.gguf"):
        plan_cluster(gone, workers=1)


def _installed(name: str) -> ModuleType:
    """A module of which only its being there matters."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    return module


def test_the_children_of_a_plan_use_its_servers_and_engine() -> None:
    plan = plan_cluster(Sources(overrides={"worker.engine": "echo"}), workers=2)

    joined = plan.joined(
        etcd="unix:/a", nats="nats://127.0.0.1:2", nats_token="t", secret_file="/secret"
    )
    environ = plan.child_environ(joined)

    config = load_config(environ={k: v for k, v in environ.items() if k.startswith("TRINAMO_")})
    assert config.control_plane.etcd.endpoints == ("unix:/a",)
    assert config.control_plane.embedded is False
    assert config.event_plane.nats.servers == ("nats://127.0.0.1:2",)
    assert config.event_plane.nats.token == Secret("t")
    assert config.security.secret_file == "/secret"
    assert config.worker.engine == "echo"


@pytest.mark.parametrize(
    ("overrides", "has_etcd", "has_nats"),
    [
        ({}, True, True),
        ({"control_plane.embedded": False}, False, True),
        ({"control_plane.etcd.endpoints": "a:1"}, False, True),
        ({"event_plane.nats.servers": "nats://a:1"}, True, False),
        ({"event_plane.nats.servers": "nats://a:1", "event_plane.embedded": True}, True, True),
        ({"event_plane.backend": "memory"}, True, False),
        ({"control_plane.etcd.nodes": 3}, False, True),
        ({"control_plane.etcd.username": "u", "control_plane.etcd.password": "p"}, False, True),
        ({"event_plane.nats.token": "t"}, True, False),
        ({"event_plane.nats.tls.enabled": True}, True, False),
    ],
)
def test_servers_of_our_own_are_started_unless_others_are_named(
    overrides: dict[str, object], has_etcd: bool, has_nats: bool
) -> None:
    plan = plan_cluster(Sources(overrides={"worker.engine": "echo", **overrides}), workers=1)

    assert (plan.has_etcd, plan.has_nats) == (has_etcd, has_nats)


@pytest.mark.parametrize(
    "overrides",
    [
        {"control_plane.backend": "memory"},
        {"event_plane.backend": "memory", "data_plane.requests": "nats"},
        {"data_plane.tcp.port": 4711},
    ],
)
def test_what_processes_cannot_share_is_refused(overrides: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(overrides)).split(".")[0]):
        plan_cluster(Sources(overrides={"worker.engine": "echo", **overrides}), workers=2)


def test_a_printed_configuration_can_be_read_again(tmp_path: Path) -> None:
    config = Sources(overrides={"http.port": 1234, "control_plane.etcd.endpoints": "a:1"}).load()
    path = tmp_path / "printed.yaml"

    path.write_text(dump(config))

    assert load_config(path, environ={}) == config


@pytest.mark.parametrize("line", [b"", b"x", b"[]", b"{}", b'{"a": 1}', b'{"a": {}, "b": {}}'])
def test_a_line_that_is_no_announcement_says_nothing(line: bytes) -> None:
    assert parse_line(line) is None


def test_an_announcement_is_its_kind_and_its_facts() -> None:
    assert parse_line(b'{"ready": {"url": "x"}}') == ("ready", {"url": "x"})


def test_an_engine_of_ones_own_and_its_arguments_reach_the_children() -> None:
    sources = Sources().with_engine("./mine.py:engine", ["path=a,b.bin", "layers=4"])
    environ = plan_cluster(sources, workers=1).child_environ(sources)

    config = load_config(environ={k: v for k, v in environ.items() if k.startswith("TRINAMO_")})

    assert config.worker.engine == "./mine.py:engine"
    assert config.worker.engine_args == {"path": "a,b.bin", "layers": "4"}


@pytest.mark.parametrize("text", ["a=1, b=x", '{"a": "1", "b": "x"}'])
def test_arguments_of_an_engine_are_pairs_or_json(text: str) -> None:
    overrides = {"worker.engine": "m:e", "worker.engine_args": text}

    assert Sources(overrides=overrides).load().worker.engine_args == {"a": "1", "b": "x"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"worker.engine": "exakt"}, "'exakt' is no engine"),
        ({"worker.engine": "mine.py:"}, "is no engine"),
        ({"worker.engine": "exact", "worker.engine_args": "a=1"}, "engine of your own"),
        ({"worker.engine": "m:e", "worker.engine_args": "a"}, "'a' is no name=value"),
        ({"worker.models": "a=m:"}, "is no engine"),
    ],
)
def test_what_can_be_no_engine_is_refused_at_once(overrides: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Sources(overrides=overrides).load()


def test_several_models_may_have_engines_of_ones_own() -> None:
    worker = Sources(overrides={"worker.models": "a=m:e;arg=x=1;arg=y=2,b=echo"}).load().worker

    assert [(each.engine, each.engine_args) for each in worker.by_model()] == [
        ("m:e", {"x": "1", "y": "2"}),
        ("echo", {}),
    ]


def test_an_argument_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--engine-arg 'layers': write key=value"):
        Sources().with_engine("m:e", ["layers"])


def test_engines_complete_to_ours_and_to_what_the_folder_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        '@trinamo.engine(\n    name="x",\n)\nasync def parrot(request, context): ...\n'
        "def other(): ...\n@engine\nclass Big: ...\n"
    )

    assert complete_engine("ex") == ["exact"]
    assert complete_engine("mi") == ["mine.py:parrot", "mine.py:Big"]
    assert complete_engine("./m") == ["./mine.py:parrot", "./mine.py:Big"]
    assert complete_engine("/nowhere/m") == []


def test_up_starts_workers_of_several_models() -> None:
    sources = Sources(overrides={"worker.models": "a=echo;alias=x,b=exact"})
    plan = plan_cluster(sources, workers=1)
    environ = plan.child_environ(sources)
    assert plan.engine == "echo, exact"
    assert environ["TRINAMO_WORKER__MODELS"] == "a=echo;alias=x,b=exact"
    assert "TRINAMO_WORKER__ENGINE" not in environ


@pytest.mark.parametrize(
    ("cores", "busy", "workers", "threads"),
    [(1, 0, 1, 1), (2, 0, 1, 2), (2, 1.1, 1, 1), (7, 0.2, 1, 7), (16, 0, 4, 4), (16, 8, 4, 2)],
)
def test_up_starts_a_worker_of_llamacpp_for_each_four_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, busy: float, workers: int, threads: int
) -> None:
    """And routes by prefixes where there are several, unless somebody says otherwise."""
    for module in (plan_module, engine_module):
        monkeypatch.setattr(module, "count_cores", lambda: Cores(cores, cores))
    monkeypatch.setattr(engine_module, "busy_cores", lambda: busy)
    monkeypatch.setattr(
        plan_module, "choose_engine", lambda _: engine_module.EngineChoice("llamacpp", "x")
    )
    sources = Sources()
    plan = plan_cluster(sources)
    joined = plan.joined(etcd="", nats="", nats_token="", secret_file="")
    environ = plan.child_environ(joined)
    assert (plan.workers, environ["TRINAMO_WORKER__THREADS"]) == (workers, str(threads))
    assert f"workers {workers}, each of {threads} thread" in plan.engine_reason
    assert (f"keep {busy:.1f} of {cores} busy" in plan.engine_reason) == (busy > 1)
    policy = joined.load().router.policy
    assert policy == ("kv" if workers > 1 else "round_robin")
    said = plan_cluster(Sources(overrides={"router.policy": "round_robin", "worker.threads": 3}))
    joined = said.joined(etcd="", nats="", nats_token="", secret_file="")
    assert joined.load().router.policy == "round_robin"
    assert said.child_environ(joined)["TRINAMO_WORKER__THREADS"] == "3"


def _help_texts(command: Any) -> Iterator[str]:
    yield from (command.help or "", command.epilog or "")
    yield from (getattr(each, "help", None) or "" for each in command.params)
    for each in getattr(command, "commands", {}).values():
        yield from _help_texts(each)


def test_no_word_of_a_help_text_is_taken_for_markup() -> None:
    texts = [text for text in _help_texts(typer.main.get_command(app)) if "[" in text]
    assert texts
    for text in texts:
        assert Text.from_markup(text).plain == text.replace("\\[", "["), text
