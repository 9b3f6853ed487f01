"""The configuration: sources and their order, errors that name key and line, secrets, presets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies as st

from trinamo.runtime.config.config import (
    PRESETS,
    RESERVED_VARIABLES,
    Config,
    Secret,
    config_notices,
    load_config,
)
from trinamo.runtime.config.keys import Section, config_fields, section_types
from trinamo.runtime.config.reference import dump, explain, reference_page
from trinamo.runtime.config.source import (
    DEPTH_MAX,
    FILE_BYTES_MAX,
    NODES_MAX,
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
        "bytes": ("_bytes", "_bytes_max", ".memory"),
        "tokens": ("_tokens", "_tokens_max"),
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
        ("http:\n  port: high\n", "http.port (file FILE, line 2): Expected `int`, got `str`; it is 'high'"),
        ("http:\n  port: 65536\n", "http.port (file FILE, line 2): Expected `int` <= 65535; it is 65536"),
        ("http:\n  port: true\n", "http.port (file FILE, line 2): Expected `int`, got `bool`; it is True"),
        ("http: 3\n", "http (file FILE, line 1): expected keys and values"),
        ("- a\n", "the document (file FILE, line 1): expected keys and values"),
        ("http:\n  port: 1\n  port: 2\n", "http.port (file FILE, line 3): given twice, first in line 2"),
        ("http: {[a]: 1}\n", "http (file FILE, line 1): a key is one plain word"),
        ("router: {policy: best}\n", "(one of direct, least_loaded, random, round_robin)"),
        ("http: {body_bytes_max: 2XB}\n", "'2XB' is no size; write bytes, or such as 64KiB, 32MiB, 2GB"),
        ("router: {inhibit_s: .nan}\n", "router.inhibit_s (file FILE, line 1): Expected `float`"),
        ("router: {inhibit_s: 0}\n", "router.inhibit_s (file FILE, line 1): Expected `float` > 0.0"),
        ("worker: {namespace: a/b}\n", "worker.namespace (file FILE, line 1): Expected `str` matching"),
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
def test_deep_nesting_is_refused_before_it_is_composed(file: Path, text: str) -> None:
    assert f"nested more than {DEPTH_MAX} deep" in error_of(file, text)


def test_aliases_count_as_often_as_they_are_used(file: Path) -> None:
    """The billion laughs: nine lists of nine aliases each."""
    lines = ["control_plane: {etcd: {endpoints: [", "&a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f", &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]

    assert f"more than {NODES_MAX} values" in error_of(file, "\n".join([*lines, "]}}"]))


def test_an_alias_to_itself_is_refused(file: Path) -> None:
    assert "levels" in error_of(file, "control_plane: {etcd: {endpoints: &a [*a]}}")


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


@pytest.mark.slow
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


@pytest.mark.slow
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
    shown = f"{config!r} {config} {password} {password!r} {dump(config)} {explain(config)}"
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
        "router.linger_s",
        "control_plane.etcd.nodes",
        "event_plane.nats.nodes",
    ]


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


def test_explain_shows_only_what_was_changed() -> None:
    config = load_config(environ={}, overrides={"http.port": 1, "worker.model_name": "m"})

    assert explain(config) == "http.port: 1\nworker.model_name: m"
    assert explain(Config()) == ""


def test_the_configuration_page_is_the_one_the_code_writes() -> None:
    """Mend it with `make docs`."""
    page = Path(__file__).parents[3] / "docs" / "configuration.md"

    assert page.read_text("utf-8") == reference_page()


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
