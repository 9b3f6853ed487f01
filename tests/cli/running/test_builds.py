"""Builds side by side: one of before versions were told, and one that speaks one minor more than this.

What the newer one adds, a frame, a field of a request, a field and a key of the store, this one skips.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.cli.places import Place, RunningCluster, cluster, wait_for
from tests.session.needs import HISTORY
from trinamo.runtime.protocol.versions import SPOKEN

pytestmark = [pytest.mark.slow, pytest.mark.services]

ROOT: Final = Path(__file__).parents[3]
UNVERSIONED: Final = "65a48f1"
"""The last release that told no version."""
MODEL: Final = "of-another-build"
START_S: Final = 60
NEWER: Final = f"{SPOKEN[-1].major}.{SPOKEN[-1].minor + 1}"


def old_build(place: Path) -> Path:
    """The tree of `UNVERSIONED`, out of the history."""
    git = shutil.which("git")
    if git is None:
        HISTORY.lacking()
    packed = subprocess.run(
        [git, "archive", UNVERSIONED], cwd=ROOT, capture_output=True, check=False
    )
    if packed.returncode:
        HISTORY.lacking()
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(place, filter="tar")
    return place / "src"


def newer_build(place: Path) -> Path:
    """This tree with one minor more, and something new in each place where a minor may add."""
    for each in ("src", "runtime", "transports", "sim"):
        shutil.copytree(ROOT / each, place / each, symlinks=True)
    for path, before, after in ADDED:
        file = place / path
        text = file.read_text("utf-8")
        assert text.count(before) == 1, path
        file.write_text(text.replace(before, after), "utf-8")
    return place / "src"


# fmt: off
ADDED: Final = (
    ("runtime/protocol/versions.py",
     f"SPOKEN: Final = (Version{tuple(SPOKEN[-1])},)",
     f"SPOKEN: Final = (Version{NEWER.replace('.', ', ').join('()')},)"),
    # A field of every entry.
    ("runtime/protocol/versions.py",
     'return msgspec.json.encode(entry)[:-1] + b"," + _OURS[1:]',
     """return msgspec.json.encode(entry)[:-1] + b',"new":{"a":[1]},' + _OURS[1:]"""),
    # A field of every request, and one of where its answer goes.
    ("runtime/protocol/streams/request.py",
     "encode_envelope: Final = msgspec.json.Encoder().encode",
     """def encode_envelope(said: object) -> bytes:
    text = msgspec.json.encode(said).replace(b'"address":', b'"new":{"a":[1]},"address":')
    return b'{"new":{"a":[1]},' + text[1:] if text.startswith(b'{"') else text"""),
    # A frame on every stream, with what opens it.
    ("runtime/protocol/streams/link_frames.py",
     "    return _OPENING.pack(*head) + subject",
     "    return _OPENING.pack(*head) + subject + _frame(stream, 200, b'new')"),
    # A key of the store, beside that of every instance.
    ("runtime/process/entries.py",
     "        await self._put(instance.key, partial(_render, instance))\n        self._inst",
     "        await self._put('new', lambda _: b'{}')\n        await self._put(instance.key, partial(_render, instance))\n        self._inst"),
)
# fmt: on


@contextmanager
def member(here: RunningCluster, place: Path, source: Path, *arguments: str) -> Iterator[Place]:
    """A process of another build in the cluster `here`, ended with SIGTERM."""
    (path,) = (here.place.root / "run").rglob("*.json")
    record = json.loads(path.read_text("utf-8"))
    joins = ("--etcd", ",".join(record["etcd"]), "--nats", ",".join(record["nats"]))
    settings = [f"--set={key}={value}" for key, value in record["settings"].items()]
    home = Place(place, extra={"PYTHONPATH": str(source)})
    place.mkdir()
    process = home.start(*arguments, *joins, *settings)
    try:
        wait_for(
            lambda: "is ready" in home.output or process.poll() is not None, START_S, "its start"
        )
        assert process.poll() is None, home.output
        yield home
    finally:
        process.terminate()
        process.wait(START_S)


def models(url: str) -> list[str]:
    return [each["id"] for each in httpx.get(f"{url}/v1/models").json()["data"]]


def chat(url: str, model: str, words: str, **more: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": words}], **more}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=START_S)


def assert_it_answers(url: str, model: str) -> None:
    """Whole and streamed."""
    whole = chat(url, model, "hello there")
    assert whole.json()["choices"][0]["message"]["content"] == "hello there"
    streamed = chat(url, model, "hello there", stream=True).text
    assert "".join(re.findall(r'"content":"([^"]*)"', streamed)) == "hello there"
    assert streamed.rstrip().endswith("data: [DONE]")


def test_a_worker_that_tells_no_version_is_neither_listed_nor_asked(tmp_path: Path) -> None:
    source = old_build(tmp_path / "old")
    arguments = ("worker", "--engine", "echo", "--model-name", MODEL, "--port", "0")
    with (
        cluster(Place(tmp_path), "--engine", "echo", "--workers", "1") as here,
        member(here, tmp_path / "its", source, *arguments),
    ):
        listed = models(here.url)
        refused = chat(here.url, MODEL, "hello")
        told = here.place.run("status").stdout
        others = chat(here.url, listed[0], "hello").json()

    assert MODEL not in listed
    assert refused.status_code == 404
    assert "speaks protocol of before 3.0" in " ".join(told.split())
    assert others["choices"][0]["message"]["content"] == "hello"


def test_a_build_that_speaks_one_minor_more_serves_and_is_served(tmp_path: Path) -> None:
    source = newer_build(tmp_path / "newer")
    worker = ("worker", "--engine", "echo", "--model-name", MODEL, "--port", "0")
    with (
        cluster(Place(tmp_path), "--engine", "echo", "--workers", "1") as here,
        member(here, tmp_path / "worker", source, *worker),
        member(here, tmp_path / "frontend", source, "frontend", "--port", "0") as frontend,
    ):
        urls = here.url, frontend.ready_url.removesuffix("/v1")
        for url in urls:
            wait_for(lambda url=url: len(models(url)) == 2, START_S, "both models")  # type: ignore[misc]
            for model in models(url):
                assert_it_answers(url, model)
        status = " ".join(here.place.run("status").stdout.split())

    assert "speaks protocol" not in status
