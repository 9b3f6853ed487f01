"""The code of the pages "write a worker" and "write a client" does what they say.

A block of Python whose first line is the name of a file is that file, in a folder that was empty.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import trio

from tests.cli.places import Place, RunningCluster, cluster, unknown_model, wait_for
from tests.shipped.test_docs import blocks
from tests.sources import ROOT
from trinamo import Context, GenerateRequest
from trinamo.runtime.engines.own.loading import load_engine

WORKER_PAGE, CLIENT_PAGE = (ROOT / "docs" / f"write_a_{what}.md" for what in ("worker", "client"))
SAID = {
    ("mine.py:engine",): "SAY IT ",
    ("shout.py:engine", "times=3"): "SAY IT!!!",
    ("loaded.py:Engine", "path=words.txt"): "some words ",
    ("aio.py:engine",): "say it ",
    ("tools.py:engine",): "yes",
    ("batches.py:engine",): "nsrvyfpghzs",
}
"""What each engine of the page answers to "say it", with the arguments that a command gives it."""


def write_files(page: Path, folder: Path) -> list[str]:
    """The files of a page; their names."""
    names = []
    for body in blocks(page, "python"):
        name = re.match(r"# (\w+\.py)\n", body)
        if name is not None:
            (folder / name[1]).write_text(body)
            names.append(name[1])
    return names


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "words.txt").write_text("some words")
    yield write_files(WORKER_PAGE, tmp_path)
    # Only these: of what they imported some, as numpy and trio-asyncio, cannot be imported twice.
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def test_every_file_of_the_worker_s_page_is_tested(engines: list[str]) -> None:
    asked = [name.partition(":")[0] for name, *_ in SAID]

    assert sorted([*asked, "serve.py", "test_mine.py"]) == sorted(engines)


def test_the_page_s_tests_of_an_engine_pass(engines: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null"]
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}", "test_mine.py"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "2 passed" in done.stdout, done.stdout


@pytest.mark.parametrize("command", SAID, ids=lambda command: command[0])
async def test_every_engine_of_the_page_answers(
    command: tuple[str, ...], engines: list[str]
) -> None:
    name, *given = command
    arguments = dict(each.split("=") for each in given)
    request = GenerateRequest(model="m", prompt="say it", max_tokens=11)

    with trio.fail_after(120):
        async with (
            load_engine(name).open(arguments=arguments) as engine,
            aclosing(engine.generate(request, Context("r"))) as deltas,
        ):
            said = "".join([delta.text async for delta in deltas])

    assert said == SAID[command]


def test_the_engine_of_the_readme_is_one_for_a_cluster_too(tmp_path: Path) -> None:
    """Its file ends with a service of its own, which an import must not start."""
    (body,) = (each for each in blocks(ROOT / "README.md", "python") if "@trinamo.engine" in each)
    (tmp_path / "parrot.py").write_text(body)
    place = Place(tmp_path)
    done = place.run("worker", "--check-engine", "--engine", "./parrot.py:parrot")
    assert done.stdout == "engine ./parrot.py:parrot is parrot\n", done.stderr


def test_the_commands_of_the_page_name_engines_that_are_there() -> None:
    lines = [line for body in blocks(WORKER_PAGE, "console") for line in body.splitlines()]
    named = set()
    for line in lines:
        words = shlex.split(line.removeprefix("$ "))
        pairs = list(pairwise(words))
        engine = [value.removeprefix("./") for option, value in pairs if option == "--engine"]
        given = [value for option, value in pairs if option == "--engine-arg"]
        named |= {(each, *given) for each in engine}

    assert named
    assert [
        name for name, *_ in named - set(SAID) if not (ROOT / name.partition(":")[0]).exists()
    ] == []


def test_the_page_s_one_process_serves(engines: list[str], tmp_path: Path) -> None:
    text = (tmp_path / "serve.py").read_text()
    (tmp_path / "serve.py").write_text(text.replace("port=8787", "port=0"))
    with script(tmp_path, "serve.py") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("parrot is served: http://127.0.0.1:")


@contextmanager
def script(folder: Path, name: str, place: Place | None = None) -> Iterator[subprocess.Popen[str]]:
    """A program that runs until it is left, in order."""
    with subprocess.Popen(
        [sys.executable, "-W", "error", name],
        cwd=folder,
        env=None if place is None else place.environ,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0
        finally:
            process.kill()


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    place = Place(tmp_path_factory.mktemp("client"))
    write_files(CLIENT_PAGE, place.root)
    with cluster(place, "--engine", "echo", "--workers", "1") as running:
        yield running


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("over_http.py", ["over HTTP"]),
        ("ask.py", ["['echo']", "say it back"]),
        ("stream.py", ["'one' None", "' two' length"]),
        ("from_asyncio.py", ["from asyncio"]),
        ("from_thread.py", ["it answers at http://127.0.0.1", "ended in order"]),
        ("limits.py", ["in time", unknown_model("nobody", "echo")]),
    ],
)
def test_every_program_of_the_client_s_page_prints_its_answer(
    name: str, lines: list[str], echo: RunningCluster
) -> None:
    assert run(echo, name) == lines


def run(cluster: RunningCluster, name: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-P", name, f"{cluster.url}/v1"],
        cwd=cluster.place.root,
        env=cluster.place.environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_endpoint_that_is_no_model_is_served_and_called(echo: RunningCluster) -> None:
    with script(echo.place.root, "greeter.py", echo.place):
        shown: list[str] = []

        def is_found() -> bool:
            shown[:] = run(echo, "greet.py")
            return bool(shown)

        wait_for(is_found, 120, "the greeting")

    assert shown == ["Hello, Ada.", "Hello, Grace."]


def test_every_file_of_the_client_s_page_is_tested(echo: RunningCluster) -> None:
    named = re.findall(r'"(\w+\.py)"', Path(__file__).read_text("utf-8"))

    assert {path.name for path in echo.place.root.glob("*.py")} <= set(named)
