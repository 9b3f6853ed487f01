"""Every example runs, and shows what its docstring says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cli.places import Place, cluster
from tests.sim.programs.test_protocols import PROTOCOLS
from tests.sources import ROOT

FOLDER = ROOT / "examples"
EXAMPLES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.py"))


def run(name: str, *arguments: str) -> str:
    """The output of an example; fails with its errors if it does."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / name), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


@contextmanager
def script_that_serves(name: str) -> Iterator[str]:
    """The URL that an example prints; it is ended in order by a signal, and logs no warning."""
    with subprocess.Popen(
        [sys.executable, "-W", "error", str(ROOT / "examples" / name)],
        env={**os.environ, "TRINAMO_HTTP__PORT": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
            process.send_signal(signal.SIGINT)
            _, logged = process.communicate(timeout=120)
            assert process.returncode == 0, logged
            assert {json.loads(line)["level"] for line in logged.splitlines()} == {"info"}, logged
        finally:
            process.kill()


def test_every_example_has_a_test() -> None:
    text = Path(__file__).read_text("utf-8")
    tested = re.findall(r'(?:run|script_that_serves)\("([\w./]+)"', text)
    # What they import is no example of its own.
    tested += [f"protocols/{name}.py" for name in ("messages", *(each[0] for each in PROTOCOLS))]

    assert [name for name in EXAMPLES if name not in tested] == []


def test_hello_greets_over_the_planes() -> None:
    assert run("hello.py") == "Hello, Ada.\nHello, Grace.\n"


def test_a_unary_call_returns_raises_and_is_told_that_nobody_waits() -> None:
    lines = run("unary.py").splitlines()

    assert lines[0] == "words: 5"
    assert lines[1] == "RequestError: 'text' is missing"
    assert sorted(line.split(":")[0] for line in lines[2:]) == ["DeadlineError", "worker"]
    assert "worker: nobody waits for this one any more: deadline" in lines


def test_the_http_service_is_built_given_models_run_and_stopped() -> None:
    assert run("http_service.py").splitlines() == [
        "refused: the model 'llama-3-70b' is already served",
        "chats: llama-3-70b",
        "completions: codellama-34b",
        "llama-3-70b says: A nursery for every task.",
        "any: False",
    ]


def test_an_exchange_answers_while_it_is_still_asked() -> None:
    bytes_heard = [f"{count} bytes of Latin" for count in (1000, 2000, 3000)]

    assert run("exchange.py").splitlines() == [*bytes_heard, "that was all"]


def test_a_peer_of_forty_lines_reads_one_stream_by_hand() -> None:
    lines = run("by_hand/one_stream.py").splitlines()

    assert re.fullmatch(r"greeted by [0-9a-f]{16}", lines[0])
    assert lines[1:] == [
        "stream 1, kind 1: b'by hand'",
        "stream 1, kind 2: b''",
        "items [1, 1, 1]",
        "stream 1, kind 6: b''",
    ]


def test_a_queue_s_jobs_are_done_or_kept_as_dead_letters() -> None:
    lines = run("jobs.py").splitlines()

    assert lines[0] == "by-3 again: duplicate"
    assert sorted(lines[1:3]) == [
        "by-3: 12 / 3 = 4 (attempt 1)",
        "by-4: 12 / 4 = 3 (attempt 1)",
    ]
    assert lines[3].startswith("by-0: given up after 2 attempts: ZeroDivisionError")


def test_a_store_of_one_s_own_tells_a_watch_of_a_change() -> None:
    health, first = run("sqlite_transport.py").splitlines()

    assert health.startswith("SQLite 3.")
    assert first.startswith("Snapshot(revision=1, entries=[Entry(key='a/key', value=b'value'")


def test_a_consumer_that_leaves_cancels_the_handler() -> None:
    out = run("disconnect.py")

    assert re.search(r"worker: cancelled \(\w+\), [\d.]+ ms after that", out), out


def test_two_workers_are_asked_in_turn_until_one_leaves() -> None:
    lines = run("two_workers.py").splitlines()

    assert {line.split()[0] for line in lines[:4]} == {"first", "second"}
    assert lines[4] == "the second worker has left"
    assert [line.split()[0] for line in lines[5:]] == ["first", "first"]


def test_a_killed_worker_is_a_typed_error_and_then_avoided() -> None:
    out = run("kill_a_worker.py")

    assert "the worker was killed: DisconnectedError" in out
    assert out.count("the other worker answers: [0, 1, 2]") == 3


def test_an_answer_goes_on_when_its_worker_is_killed() -> None:
    lines = run("migrate.py").splitlines()

    assert lines == ["the worker was killed after 50 events", "the same text: True"]


def test_a_prompt_is_computed_by_one_worker_and_answered_by_another() -> None:
    lines = run("disaggregation/remote_prefill.py").splitlines()

    assert 'reason="long_prompt",where="remote"} 1.0' in lines[0]
    assert lines[1].endswith("} 13.0")
    assert lines[2] == "tokens as of one engine alone: True"


def test_an_engine_of_one_s_own_has_its_prompts_computed_elsewhere() -> None:
    lines = run("disaggregation/own_engine.py").splitlines()

    assert 'reason="long_prompt",where="remote"} 1.0' in lines[0]
    assert lines[1].endswith("} 13.0")
    assert lines[2] == "tokens as of one engine alone: True"


def test_one_worker_reads_blocks_of_another() -> None:
    lines = run("read_blocks.py").splitlines()

    assert sorted(lines) == [
        "3 blocks by tcp",
        "the owner was told: three blocks read",
        "their bytes are right: True",
    ]


def test_an_engine_of_one_s_own_answers_over_http() -> None:
    with script_that_serves("own_engine.py") as url:
        body = json.dumps({"prompt": "polly wants a token"}).encode()
        request = urllib.request.Request(
            f"{url}/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = json.load(answer)["choices"][0]["text"]

    assert text == "POLLY WANTS A TOKEN "


def test_the_official_client_gets_its_answers(tmp_path: Path) -> None:
    with cluster(Place(tmp_path), "--engine", "echo", "--workers", "1") as running:
        out = run("chat.py", f"{running.url}/v1", "say it back")

    assert out == "model: echo\nwhole: say it back\nstreamed: say it back\n3 tokens\n"
