"""What the sections of a configuration allow: secrets, notices, presets, rules between keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trinamo.runtime.config.config import PRESETS, Config, config_notices, load_config
from trinamo.runtime.config.keys import Secret, Section
from trinamo.runtime.config.source import (
    dump,
)
from trinamo.runtime.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trinamo.yaml"


def error_of(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ={})
    return str(caught.value).replace(str(path), "FILE")


# --- secrets -----------------------------------------------------------------------------------


def test_a_secret_is_shown_only_on_request() -> None:
    environ = {
        "TRINAMO_CONTROL_PLANE__ETCD__USERNAME": "user",
        "TRINAMO_CONTROL_PLANE__ETCD__PASSWORD": "hunter2",
        "TRINAMO_EVENT_PLANE__NATS__TOKEN": "hunter2",
    }

    config = load_config(environ=environ)

    password = config.control_plane.etcd.password
    assert password is not None
    assert password.reveal() == "hunter2"
    shown = f"{config!r} {config} {password} {password!r} {dump(config)}"
    assert "hunter2" not in shown
    assert shown.count("***") >= 6


def test_a_bad_secret_is_not_quoted(file: Path) -> None:
    message = error_of(file, "event_plane: {nats: {token: [hunter2]}}")

    assert "event_plane.nats.token" in message
    assert "hunter2" not in message


def test_a_password_inside_a_url_is_refused_unquoted(file: Path) -> None:
    message = error_of(file, "event_plane: {nats: {servers: ['nats://user:hunter2@host:1']}}")

    assert "by their keys" in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("control_plane: {etcd: {endpoints: ['10.0.0.5']}}", "'10.0.0.5' is no etcd endpoint"),
        ("control_plane: {etcd: {endpoints: ['nats://a:1']}}", "'nats://a:1' is no etcd"),
        ("control_plane: {etcd: {endpoints: ['unix:/a', 'b:1']}}", "'unix:/a' is no etcd"),
        ("event_plane: {nats: {servers: ['http://a:4222']}}", "'http://a:4222' is no address"),
        ("event_plane: {nats: {servers: ['a:4222']}}", "nats://host:port is one"),
        ("event_plane: {nats: {servers: ['nats://a:70000']}}", "'nats://a:70000' is no address"),
    ],
)
def test_what_is_no_address_is_refused_where_it_is_written(
    file: Path, text: str, words: str
) -> None:
    message = error_of(file, text)

    assert words in message
    assert "FILE, line 1" in message


@pytest.mark.parametrize(
    "text",
    [
        "control_plane: {etcd: {endpoints: ['unix:/a']}}",
        "control_plane: {etcd: {endpoints: ['a:1', 'http://[::1]:2']}}",
        "event_plane: {nats: {servers: ['nats://a', 'tls://[::1]:4222', 'ws://a:80/path']}}",
    ],
)
def test_every_usual_form_of_an_address_is_taken(file: Path, text: str) -> None:
    file.write_text(text)
    load_config(file, environ={})


def test_equal_secrets_are_equal() -> None:
    assert Secret("a") == Secret("a")
    assert Secret("a") != Secret("b")
    assert len({Secret("a"), Secret("a")}) == 1


# --- notices -----------------------------------------------------------------------------------


def test_what_is_valid_but_not_what_it_seems_is_said() -> None:
    overrides = {
        "data_plane.nixl.enabled": True,
        "data_plane.mooncake.enabled": True,
        "data_plane.transfer.enabled": False,
        "control_plane.embedded": False,
        "control_plane.etcd.nodes": 3,
        "event_plane.embedded": False,
        "event_plane.nats.nodes": 3,
        "control_plane.etcd.lease_ttl_s": 20,
    }

    notices = config_notices(load_config(environ={}, overrides=overrides))

    assert [notice.split()[0] for notice in notices] == [
        "data_plane.nixl.rdma_interface",
        "Mooncake",
        "data_plane.transfer.enabled",
        "router.silence_grace_s",
        "router.stale_grace_s",
        "control_plane.etcd.nodes",
        "event_plane.nats.nodes",
    ]


def test_a_process_that_moves_no_block_is_told_nothing_of_what_moves_them() -> None:
    config = load_config(environ={}, overrides={"data_plane.nixl.enabled": True})

    assert len(config_notices(config)) == 1
    assert config_notices(config, moves_blocks=False) == []


@pytest.mark.parametrize(
    ("settings", "clear"),
    [
        ({"nixl.rdma_interface": "ib0", "nixl.enabled": True}, ["KV blocks by NIXL go in clear"]),
        ({"nixl.enabled": True}, []),
        ({"mooncake.enabled": True}, ["KV blocks by Mooncake go in clear"]),
    ],
)
def test_what_moves_blocks_in_clear_beside_closed_links_is_said(
    settings: dict[str, object], clear: list[str]
) -> None:
    overrides = {f"data_plane.{key}": value for key, value in settings.items()}
    overrides["security.secret_file"] = "cluster.secret"
    notices = config_notices(load_config(environ={}, overrides=overrides))
    assert [each.partition(",")[0] for each in notices if "in clear" in each] == clear


@pytest.mark.parametrize(
    ("grace_s", "notice"),
    [(5, "lose its streams"), (9, "lose its silent requests before its lease"), (10, "")],
)
def test_a_grace_shorter_than_the_lease_is_said(grace_s: float, notice: str) -> None:
    """Above half of it a worker can register again, but one that stalls is judged too early."""
    overrides = {"router.silence_grace_s": grace_s}
    notices = config_notices(load_config(environ={}, overrides=overrides))
    assert [each.split()[0] for each in notices] == ["router.silence_grace_s"] * bool(notice)
    assert notice in "".join(notices)


def test_the_defaults_and_the_small_preset_give_no_notice() -> None:
    assert config_notices(Config()) == []
    assert config_notices(load_config(preset="small", environ={})) == []


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"data_plane.mooncake.threads": 8, "data_plane.mooncake.queue_depth": 4}, "queue_depth"),
        ({"data_plane.nixl.progress_delay_s": 0}, "progress_delay_s"),
        ({"data_plane.transfer.checksum": "md5"}, "data_plane.transfer.checksum"),
        ({"data_plane.transfer.slice_bytes": 0}, "data_plane.transfer.slice_bytes"),
        ({"data_plane.mooncake.transfer_timeout_s": 1}, "transfer_timeout_s"),
        (
            {
                "data_plane.nixl.enabled": True,
                "data_plane.nixl.fallback": "mooncake",
                "data_plane.mooncake.enabled": True,
            },
            "nixl.fallback is mooncake, but mooncake.protocol is tcp",
        ),
    ],
)
def test_a_bad_value_about_transfers_names_its_key(
    overrides: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config(environ={}, overrides=overrides)


# --- presets and the reference -----------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_loads(preset: str) -> None:
    config = load_config(preset=preset, environ={})

    etcd, nats = config.control_plane.etcd, config.event_plane.nats
    nodes = {"small": 1, "medium": 3, "large": 5}[preset]
    assert (etcd.nodes, len(etcd.endpoints)) == (nodes, nodes)
    assert (nats.nodes, len(nats.servers)) == (nodes, nodes)
    assert config.data_plane.nixl.enabled == (preset != "small")


def test_the_presets_have_the_published_sizes() -> None:
    sizes = {
        preset: (config.control_plane.etcd.memory, config.event_plane.nats.memory)
        for preset in PRESETS
        for config in [load_config(preset=preset, environ={})]
    }

    gb = 10**9
    assert sizes == {"small": (2 * gb, gb), "medium": (4 * gb, 2 * gb), "large": (8 * gb, 4 * gb)}


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_dumped_can_be_read_back(preset: str, file: Path) -> None:
    config = load_config(preset=preset, environ={})
    file.write_text(dump(config), encoding="utf-8")

    assert load_config(file, environ={}) == config


def test_the_configuration_is_frozen() -> None:
    config = Config()
    assert isinstance(config, Section)

    with pytest.raises(AttributeError):
        config.http = config.http  # type: ignore[misc]


PLAIN = [
    ("control_plane.etcd", "endpoints", "etcd-0:2379", {"username": "u", "password": "p"}),
    ("control_plane.etcd", "endpoints", "http://10.0.0.5:2379", {"username": "u", "password": "p"}),
    ("event_plane.nats", "servers", "nats://10.0.0.5:4222", {"username": "u", "password": "p"}),
    ("event_plane.nats", "servers", "nats://127.0.0.1:1,nats://nats-1:4222", {"token": "t"}),
]


@pytest.mark.parametrize(("section", "name", "addresses", "secrets"), PLAIN)
def test_a_password_leaves_this_machine_in_clear_only_by_consent(
    section: str, name: str, addresses: str, secrets: dict[str, str]
) -> None:
    given = {f"{section}.{key}": value for key, value in {name: addresses, **secrets}.items()}

    with pytest.raises(ConfigError, match=r"in clear.*tls\.enabled: true, or allow_plain_password"):
        load_config(environ={}, overrides=given)

    for consent in ("allow_plain_password", "tls.enabled"):
        load_config(environ={}, overrides={**given, f"{section}.{consent}": "true"})


@pytest.mark.parametrize(
    ("section", "addresses"),
    [
        ("control_plane.etcd", {"endpoints": "127.0.0.1:2379,[::1]:2379,localhost:2379"}),
        ("control_plane.etcd", {"endpoints": "unix:///run/etcd.sock"}),
        ("control_plane.etcd", {"endpoints": "https://etcd-0:2379"}),
        ("event_plane.nats", {"servers": "nats://127.0.0.1:4222,nats://[::1]:4222"}),
        ("event_plane.nats", {"servers": "tls://nats-0:4222"}),
    ],
)
def test_a_password_for_this_machine_or_over_tls_needs_no_consent(
    section: str, addresses: dict[str, str]
) -> None:
    given = {**addresses, "username": "u", "password": "p"}

    load_config(environ={}, overrides={f"{section}.{key}": text for key, text in given.items()})


@pytest.mark.parametrize("name", ["ca_file", "server_name"])
def test_a_word_about_tls_without_tls_is_a_mistake(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is set, but enabled is false"):
        load_config(environ={}, overrides={f"event_plane.nats.tls.{name}": "x"})


def test_a_value_that_is_none_of_the_choices_is_quoted_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ={}, overrides={"data_plane.mooncake.protocol": "mooncake_tcp"})

    assert caught.value.message == (
        "data_plane.mooncake.protocol (command line): Invalid enum value 'mooncake_tcp'"
        " (one of rdma, tcp)"
    )


@pytest.mark.parametrize("plane", ["control_plane", "event_plane"])
def test_an_embedded_server_needs_no_words_about_logging_in(plane: str) -> None:
    server = "etcd" if plane == "control_plane" else "nats"
    for words in ({"tls.enabled": True}, {"username": "u", "password": "p"}):
        overrides = {f"{plane}.{server}.{key}": value for key, value in words.items()}
        with pytest.raises(ConfigError, match=rf"(?i)an embedded {server}"):
            load_config(environ={}, overrides={f"{plane}.embedded": True, **overrides})
        load_config(environ={}, overrides=overrides)
