"""The configuration: sources and their order, errors that name key and line, secrets, presets."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies as st

from trinamo.runtime.config.config import Config, load_config
from trinamo.runtime.config.keys import config_fields, section_types
from trinamo.runtime.config.source import (
    FILE_BYTES_MAX,
    RESERVED_VARIABLES,
    build_config,
    parse_size,
    read_yaml,
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


def test_no_source_gives_the_defaults() -> None:
    assert load_config(environ={}) == Config()


def test_every_key_has_a_default_and_a_sentence() -> None:
    silent = [key for key, field in config_fields(Config).items() if not field.text.endswith(".")]

    assert silent == []


def test_every_section_says_what_it_is_for() -> None:
    assert all(section.__doc__ for section in section_types(Config).values())


def test_every_time_and_size_has_its_unit_in_its_name() -> None:
    endings = {
        "s": ("_s",),
        "bytes": ("_bytes", "_bytes_max", ".bytes_per_second_max", ".memory"),
        "tokens": ("_tokens", "_tokens_max", "_tokens_local_max"),
    }
    wrong = [
        key
        for key, field in config_fields(Config).items()
        if field.unit in endings and not key.endswith(endings[field.unit])
    ]

    assert wrong == []


# --- the order of the sources ------------------------------------------------------------------


def test_a_later_source_wins_key_by_key(file: Path) -> None:
    file.write_text("http: {port: 2, requests_max: 20}\nworker: {threads: 7}\n", encoding="utf-8")

    config = load_config(
        file,
        preset="medium",
        environ={"TRINAMO_HTTP__REQUESTS_MAX": "30", "TRINAMO_HTTP__PORT": "3"},
        overrides={"http.port": 4},
    )

    assert (config.http.host, config.worker.threads) == ("0.0.0.0", 7)
    assert (config.http.requests_max, config.http.port) == (30, 4)


@pytest.mark.parametrize(
    ("name", "text", "key", "expected"),
    [
        ("DATA_PLANE__TCP__PORT", "5000", "data_plane.tcp.port", 5000),
        ("DATA_PLANE__TCP__USER_TIMEOUT_S", " 1.5 ", "data_plane.tcp.user_timeout_s", 1.5),
        ("DATA_PLANE__TCP__DATA_BYTES_MAX", "64KiB", "data_plane.tcp.data_bytes_max", 65536),
        ("DATA_PLANE__TCP__INTERFACE", "null", "data_plane.tcp.interface", None),
        ("CONTROL_PLANE__EMBEDDED", "true", "control_plane.embedded", True),
        ("CONTROL_PLANE__ETCD__ENDPOINTS", "a:1, [::1]:2", "control_plane.etcd.endpoints", ("a:1", "[::1]:2")),
        ("WORKER__STATUS_PORT", "null", "worker.status_port", None),
        ("HTTP__ON_DISCONNECT", "stop", "http.on_disconnect", "stop"),
    ],
)  # fmt: skip
def test_text_from_the_environment_becomes_the_key_s_type(
    name: str, text: str, key: str, expected: object
) -> None:
    config: Any = load_config(environ={f"TRINAMO_{name}": text})

    for part in key.split("."):
        config = getattr(config, part)
    assert config == expected


def test_an_empty_section_or_file_changes_nothing(file: Path) -> None:
    file.write_text("http:\n  # port: 1\n", encoding="utf-8")
    assert load_config(file, environ={}) == Config()

    file.write_text("", encoding="utf-8")
    assert load_config(file, environ={}) == Config()


def test_words_of_yaml_1_1_stay_text(file: Path) -> None:
    file.write_text("worker: {model_name: off}\nhttp: {host: 12:30}\n", encoding="utf-8")

    config = load_config(file, environ={})

    assert (config.worker.model_name, config.http.host) == ("off", "12:30")


def test_an_alias_repeats_a_value(file: Path) -> None:
    file.write_text("http: {host: &all 0.0.0.0}\nworker: {status_host: *all}\n", encoding="utf-8")

    assert load_config(file, environ={}).worker.status_host == "0.0.0.0"


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http:\n  prot: 1\n", "http.prot (file FILE, line 2): no such key; did you mean http.port?"),
        ("data_plan: {}\n", "data_plan (file FILE, line 1): no such key; did you mean data_plane?"),
        ("http: {tls: {cert_file: a}}\n", "http.tls.cert_file (file FILE, line 1): no such key; did you mean http.tls.certificate_file?"),
        ("http:\n  hosts: 7\n", "http.hosts (file FILE, line 2): Expected a list, got `int`; it is 7"),
        ("http:\n  port: high\n", "http.port (file FILE, line 2): Expected `int`, got `str`; it is 'high'"),
        ("http:\n  port: 65536\n", "http.port (file FILE, line 2): Expected `int` <= 65535; it is 65536"),
        ("http:\n  port: true\n", "http.port (file FILE, line 2): Expected `int`, got `bool`; it is True"),
        ("http: 3\n", "http (file FILE, line 1): expected keys and values"),
        ("- a\n", "the document (file FILE, line 1): expected keys and values"),
        ("http:\n  port: 1\n  port: 2\n", "http.port (file FILE, line 3): given twice, first in line 2"),
        ("http: {[a]: 1}\n", "http (file FILE, line 1): a key is one plain word"),
        ("router: {policy: best}\n", "(one of direct, kv, least_loaded, power_of_two, random, round_robin)"),
        ("http: {body_bytes_max: 2XB}\n", "'2XB' is no size; write bytes, or such as 64KiB, 32MiB, 2GB"),
        ("router: {inhibit_s: .nan}\n", "router.inhibit_s (file FILE, line 1): Expected `float`"),
        ("http: {rate_per_s: 5e-324}\n", "http.rate_per_s (file FILE, line 1): Expected `float` >= 1e-06"),
        ("router: {inhibit_s: 0}\n", "router.inhibit_s (file FILE, line 1): Expected `float` > 0.0"),
        ("worker: {namespace: a/b}\n", "worker.namespace (file FILE, line 1): Expected `str` matching"),
        ('http: {api_keys_file: "a\\0"}\n', "http.api_keys_file (file FILE, line 1): text has no NUL"),
        ('worker: {models: ["a=echo;path=\\0"]}\n', "worker.models (file FILE, line 1): text has no NUL"),
        ("http: [\n", "file FILE, line 2: not valid YAML"),
        ("log:\n  level: !!python/name:os.system x\n", "file FILE, line 2: not valid YAML"),
        ("control_plane:\n  etcd:\n    username: x\n", "etcd: username needs password beside it"),
        ("control_plane: {etcd: {tls: {cert_file: x, key_file: y}}}\n", "but enabled is false"),
        ("control_plane: {embedded: true, etcd: {nodes: 3}}\n", "embedded starts one etcd server"),
        ("event_plane: {nats: {token: x, credentials_file: y}}\n", "exclude each other"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_named_with_its_key_and_line(
    file: Path, text: str, message: str
) -> None:
    assert message in error_of(file, text)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("TRINAMO_HTTP_PORT", "TRINAMO_HTTP_PORT is not known; did you mean TRINAMO_HTTP__PORT?"),
        ("TRINAMO_MODLE", "TRINAMO_MODLE is not known; did you mean TRINAMO_MODEL?"),
        ("TRINAMO_HTTP", "TRINAMO_HTTP is not known"),
    ],
)
def test_an_unknown_variable_is_named_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match="environment variable") as caught:
        load_config(environ={name: "1"})

    assert message in str(caught.value)


def test_a_bad_value_in_the_environment_names_the_variable() -> None:
    with pytest.raises(
        ConfigError, match=r"http\.port \(environment variable TRINAMO_HTTP__PORT\)"
    ):
        load_config(environ={"TRINAMO_HTTP__PORT": "x"})


def test_an_unknown_override_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"port \(command line\): no such key; did you mean"):
        load_config(environ={}, overrides={"port": 1})


def test_variables_for_others_are_passed_over() -> None:
    kubernetes = {
        "TRINAMO_FRONTEND_SERVICE_HOST": "10.0.0.1",
        "TRINAMO_FRONTEND_SERVICE_PORT_HTTP": "80",
        "TRINAMO_FRONTEND_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    environ = dict.fromkeys(RESERVED_VARIABLES, "x") | kubernetes | {"HOME": "/", "TRINAMOX": "1"}

    assert load_config(environ=environ) == Config()


def test_an_unreadable_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load_config(tmp_path / "absent.yaml", environ={})
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load_config(tmp_path, environ={})


def test_a_pipe_is_refused_for_it_is_read_more_than_once(tmp_path: Path) -> None:
    """A shell's `<(…)` is one: the second look found it empty, and took the defaults."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="a pipe, which can be read only once"):
        load_config(tmp_path / "pipe")


@pytest.mark.parametrize(
    "text",
    [f"http: {{port: {'9' * 5000}}}"]
    + [f"http: {{port: !!{tag}}}" for tag in ("int a", "float a", "bool a", "timestamp a")],
)
def test_a_value_that_is_not_what_its_tag_says_is_a_sentence(file: Path, text: str) -> None:
    assert "a value cannot be read" in error_of(file, text)


def test_a_file_that_is_not_text_is_a_configuration_error(file: Path) -> None:
    file.write_bytes(b"http: \xff\xfe")

    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 6\)"):
        load_config(file, environ={})


def test_an_unknown_preset_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no preset 'huge'; there are small, medium, large"):
        load_config(preset="huge", environ={})


# --- bounds ------------------------------------------------------------------------------------


def test_a_file_above_the_bound_is_not_parsed(file: Path) -> None:
    assert f"larger than {FILE_BYTES_MAX} bytes" in error_of(file, "#" * (FILE_BYTES_MAX + 1))


@pytest.mark.parametrize("text", ["[" * 100_000, "http: " + "{a: " * 5000, "- " * 5000])
def test_deep_nesting_is_told_in_a_sentence(file: Path, text: str) -> None:
    assert error_of(file, text).endswith("nested too deep")


def test_an_alias_to_itself_is_refused(file: Path) -> None:
    assert "recursive" in error_of(file, "control_plane: {etcd: {endpoints: &a [*a]}}")


@pytest.mark.parametrize(
    ("text", "size"),
    [("512", 512), ("2GB", 2_000_000_000), ("64KiB", 65_536), ("1.5 MiB", 1_572_864), ("7B", 7)],
)
def test_sizes_are_read_with_their_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e9", "2 gb", "1 GB x", "0x10"])
def test_other_text_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)


WORDS = ["http", "port", "data_plane", "tcp", "control_plane", "etcd", "endpoints", "log", "x", ""]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.dates()


@given(
    st.text(max_size=80)
    | st.recursive(
        LEAVES,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(WORDS) | st.integers() | st.text(), inner, max_size=4)
        ),
    ).map(yaml.safe_dump)
)
def test_whatever_a_file_says_is_a_configuration_or_an_error(text: str) -> None:
    message = complaint(lambda: build_config(Config, read_yaml(Config, text, "file")))

    assert "\n" not in message


@given(st.sampled_from(sorted(config_fields(Config))), st.text(max_size=20))
def test_whatever_a_variable_says_is_a_configuration_or_an_error(key: str, text: str) -> None:
    name = "TRINAMO_" + key.replace(".", "__").upper()
    message = complaint(lambda: load_config(environ={name: text}))

    assert not message or key.rpartition(".")[0] in message


def complaint(load: Callable[[], Config]) -> str:
    """What the error says, or nothing if there was none; other exceptions pass."""
    try:
        load()
    except ConfigError as error:
        return str(error)
    return ""
