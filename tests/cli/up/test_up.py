"""`trinamo up` as its user sees it: real servers, real processes, real signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.cli.places import (
    Place,
    RunningCluster,
    cluster,
    is_running,
    rss_bytes,
    terminal,
    wait_for,
)


def chat(url: str, text: str, **more: Any) -> dict[str, Any]:
    body = json.dumps({"messages": [{"role": "user", "content": text}], **more}).encode()
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """A cluster of two echo workers that the tests of this file share and leave as it was."""
    place = Place(tmp_path_factory.mktemp("echo"))
    with cluster(place, "--engine", "echo") as running:
        yield running


def test_a_cluster_answers(echo: RunningCluster) -> None:
    assert text_of(chat(echo.url, "say it back")) == "say it back"


def test_the_dashboard_is_where_it_says(echo: RunningCluster) -> None:
    line = next(each for each in echo.place.output.splitlines() if "dashboard: " in each)
    url = line.rpartition(" ")[2]
    with urllib.request.urlopen(url, timeout=120) as response:
        assert b"<title>trinamo</title>" in response.read()
    assert url == f"{echo.url}/dashboard"


def test_the_engine_and_the_reason_for_it_are_said(echo: RunningCluster) -> None:
    assert "engine echo: as configured" in echo.place.output


def test_output_that_is_no_terminal_gets_plain_lines(echo: RunningCluster) -> None:
    assert "\x1b" not in echo.place.output
    assert "curl http" in echo.place.output


def test_status_lists_instances_and_models_without_being_told_where(echo: RunningCluster) -> None:
    done = echo.place.run("status", "--json")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    workers = {pid for pid, line in echo.children.items() if " worker " in line}
    assert {int(each["metadata"]["pid"]) for each in found["instances"]} == workers
    assert [each["health"]["status"] for each in found["instances"]] == ["ready", "ready"]
    assert all(int(each["lease_id"], 16) for each in found["instances"])
    assert [(each["name"], each["instances"]) for each in found["models"]] == [("echo", 2)]
    assert found["frontend"]["url"] == echo.url


def test_status_has_tables_for_people(echo: RunningCluster) -> None:
    done = echo.place.run("status")

    assert "Instances" in done.stdout
    assert "Models" in done.stdout
    assert "trinamo/backend/generate" in done.stdout


def test_a_request_s_way_is_shown_by_its_id(echo: RunningCluster) -> None:
    body = b'{"messages": [{"role": "user", "content": "hello"}]}'
    headers = {"content-type": "application/json", "x-request-id": "traced"}
    request = urllib.request.Request(f"{echo.url}/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        instance = response.headers["x-trinamo-worker"]

    drawn = echo.place.run("trace", "traced")
    told = json.loads(echo.place.run("trace", "traced", "--json").stdout)
    page = echo.place.run("trace", "traced", "--html", "trace.html")

    assert drawn.returncode == 0, drawn.stderr
    assert instance in drawn.stdout
    names = [(row["process"][:6], row["name"]) for row in told["request"]["rows"]]
    assert names == [("fronte", "http"), ("fronte", "attempt"), ("worker", "worker")]
    assert page.returncode == 0, page.stderr
    assert "<svg" in (echo.place.root / "trace.html").read_text()
    (echo.place.root / "trace.html").unlink()


def test_a_request_that_nobody_knows_is_a_sentence(echo: RunningCluster) -> None:
    done = echo.place.run("trace", "nobody-s")

    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "none of the 3 processes knows" in done.stderr


def test_the_shell_completes_ids_of_recent_requests(echo: RunningCluster) -> None:
    chat(echo.url, "one more")
    recent = json.loads(
        urllib.request.urlopen(_a_status_port(echo) + "/traces", timeout=120).read()
    )
    wanted = recent["request_ids"][0]
    asked = {
        "_TRINAMO_COMPLETE": "complete_bash",
        # All ids of a frontend begin alike.
        "COMP_WORDS": f"trinamo trace {wanted[:-1]}",
        "COMP_CWORD": "2",
    }
    done = subprocess.run(
        [Path(sys.executable).with_name("trinamo")],
        env={**echo.place.environ, **asked},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )

    assert done.stdout.split() == [wanted]


def _a_status_port(echo: RunningCluster) -> str:
    found = json.loads(echo.place.run("status", "--json").stdout)
    busy = max(found["instances"], key=lambda each: _served(each["metadata"]["status"]))
    return str(busy["metadata"]["status"])


def _served(status_url: str) -> int:
    with urllib.request.urlopen(f"{status_url}/traces", timeout=120) as response:
        return len(json.load(response)["request_ids"])


def test_chat_streams_an_answer_to_the_terminal(echo: RunningCluster) -> None:
    done = echo.place.run("chat", "one two three")

    assert (done.returncode, done.stdout, done.stderr) == (0, "one two three\n", "")


def test_chat_reads_a_pipe(echo: RunningCluster) -> None:
    done = echo.place.run("chat", stdin="from a pipe\n")

    assert (done.returncode, done.stdout) == (0, "from a pipe\n")


def test_chat_with_an_unknown_model_is_one_sentence(echo: RunningCluster) -> None:
    done = echo.place.run("chat", "hello", "--model", "gpt-9")

    assert done.returncode == 1
    assert "gpt-9" in done.stderr
    assert "echo" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_finds_the_servers_of_the_running_cluster(echo: RunningCluster) -> None:
    done = echo.place.run("doctor", "--json")

    found = {each["what"]: each for each in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert found["etcd"]["text"].startswith("etcd 3.")
    assert found["NATS"]["verdict"] == "good"
    assert echo.url in found["HTTP port"]["text"]


def test_a_worker_that_is_killed_is_started_again(echo: RunningCluster) -> None:
    before = {pid for pid, line in echo.children.items() if " worker " in line}
    victim = min(before)

    os.kill(victim, signal.SIGKILL)

    wait_for(lambda: "is back" in echo.place.output, 120, "the worker's return")
    after = {pid for pid, line in echo.children.items() if " worker " in line}
    assert len(after) == 2
    assert victim not in after
    assert "was killed by SIGKILL; starting it again" in echo.place.output
    assert text_of(chat(echo.url, "still there?")) == "still there?"


def test_a_frontend_that_is_killed_comes_back_on_its_port(echo: RunningCluster) -> None:
    url = echo.url
    victim = next(pid for pid, line in echo.children.items() if " frontend " in line)

    os.kill(victim, signal.SIGKILL)

    wait_for(lambda: "frontend is back" in echo.place.output, 120, "the frontend's return")
    wait_for(lambda: bool(models(url)), 120, "the models' return")
    assert text_of(chat(url, "same port")) == "same port"


def models(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=120) as response:
        return [each["id"] for each in json.load(response)["data"]]


def test_a_conversation_on_a_terminal(echo: RunningCluster) -> None:
    with terminal(echo.place, "chat") as (process, shown, type_in):
        wait_for(lambda: "> " in shown(), 120, "the prompt")
        type_in(b"hello there\n")
        answer = "hello there\r\nhello there\r\n"
        # Only at a prompt is Ctrl-D the end: what is typed before it, the line editor takes for a NUL.
        wait_for(
            lambda: "> " in shown().partition(answer)[2], 120, "the answer, and a prompt again"
        )
        type_in(b"\x04")
        assert process.wait(120) == 0, shown()


def test_a_live_table_on_a_terminal(tmp_path: Path) -> None:
    place = Place(tmp_path)
    arguments = ("up", "--engine", "echo", "--workers", "1", "--port", "0")
    with terminal(place, *arguments) as (process, shown, type_in):
        wait_for(lambda: "req/s" in shown() and "The cluster is ready" in shown(), 60, "the table")
        wait_for(lambda: "http://127" in shown().rpartition("req/s")[2], 60, "the address")
        type_in(b"\x03")
        wait_for(lambda: bool(shown()) and process.poll() is not None, 120, "the end")

    assert process.returncode == 0, shown()
    assert "draining the frontend" in shown()
    assert place.leftovers == []


def assert_nothing_is_left(place: Place, pids: list[int], url: str) -> None:
    wait_for(lambda: not any(map(is_running, pids)), 120, "the end of every process")
    assert place.leftovers == []
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", urlsplit(url).port or 0)) != 0


def test_ctrl_c_drains_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Also the memory bounds of a cluster on `exact`: frontend 120 MB, worker 108 MB.

    Of those 8 MB are the library that issues certificates, nearly all of it pages that processes share.
    """
    place = Place(tmp_path)
    with cluster(place, "--engine", "exact", "--workers", "2") as running:
        assert text_of(chat(running.url, "hello", max_tokens=8))
        children, url = running.children, running.url
        for pid, line in children.items():
            bound = {" worker ": 108, " frontend ": 120}
            for role, megabytes in bound.items():
                assert role not in line or rss_bytes(pid) <= megabytes * 2**20, line

        code = running.end(signal.SIGINT)

    assert code == 0, place.output
    assert len(children) == 5
    assert_nothing_is_left(place, [*children], url)
    ends = [place.output.index(f"{name} has ended") for name in ("frontend", "worker-1")]
    assert ends == sorted(ends)
    after = place.run("status")
    assert after.returncode == 1
    assert "trinamo up" in after.stderr
    assert len(after.stderr.splitlines()) == 1


def test_a_second_ctrl_c_ends_everything_at_once(tmp_path: Path) -> None:
    """A client that reads nothing would hold the drain up for half a minute."""
    place = Place(tmp_path)
    with cluster(
        place, "--engine", "exact", "--workers", "1", "--set", "http.drain_timeout_s=60"
    ) as running:
        children, url = running.children, running.url
        parts = urlsplit(url)
        body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 100_000}).encode()
        with socket.create_connection((parts.hostname or "", parts.port or 0)) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nContent-Length: %d\r\n"
                b"Content-Type: application/json\r\n\r\n%s" % (len(body), body)
            )
            running.process.send_signal(signal.SIGINT)
            wait_for(lambda: "draining the frontend" in place.output, 120, "the drain")
            running.process.send_signal(signal.SIGINT)
            code = running.process.wait(120)

    assert code == 130, place.output
    assert_nothing_is_left(place, [*children], url)


def test_a_kill_of_up_takes_every_process_along(tmp_path: Path) -> None:
    """And the folders that nobody could remove are swept by the next command."""
    place = Place(tmp_path)
    with cluster(place, "--engine", "echo", "--workers", "1") as running:
        children, url = running.children, running.url
        running.process.kill()
        running.process.wait()
        wait_for(lambda: not any(map(is_running, children)), 120, "the end of every process")

    assert place.run("status").returncode == 1
    assert_nothing_is_left(place, [*children], url)


def test_ctrl_c_while_starting_leaves_nothing_behind(tmp_path: Path) -> None:
    place = Place(tmp_path)
    process = place.start("up", "--port", "0", "--engine", "exact")
    try:
        wait_for(lambda: "and the frontend …" in place.output, 120, "the children's start")
        children = [*RunningCluster(place, process).children]
        process.send_signal(signal.SIGINT)
        code = process.wait(120)
    finally:
        process.kill()

    assert code == 0, place.output
    wait_for(lambda: not any(map(is_running, children)), 120, "the end of every process")
    assert place.leftovers == []
