"""The libraries the runtime is built of run inside a world, on its clock and dice."""

from __future__ import annotations

import io
import json
import logging
import os
import random
import sys
import time
import types
from typing import Any

import httpx
import prometheus_client
import pytest
import trio
from hypercorn.config import Config
from hypercorn.trio import serve

from trinamo.runtime.logs.formats import JsonFormat
from trinamo.runtime.logs.setup import LogHandler
from trinamo.sim import Escape, Network, SeedChoices, World
from trinamo.sim.isolation.ambient import is_library_calling

TOKENS = 5


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for number in range(TOKENS):
        await trio.sleep(0.02)
        body = b"data: %d\n\n" % number
        await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _serve() -> None:
    config = Config()
    config.accesslog = config.errorlog = None
    config.bind = ["0.0.0.0:8000"]
    await serve(_app, config)


def _stream_over_http(seed: int) -> tuple[str, list[str], str]:
    world = World(SeedChoices(seed))
    Network(world, tear_one_in=3, short_one_in=3)
    lines: list[str] = []
    dates: list[str] = []

    async def ask() -> None:
        async with httpx.AsyncClient(verify=False, trust_env=False, timeout=5) as client:
            files = {"file": b"a boundary is drawn for this body"}
            async with client.stream("POST", "http://web:8000/", files=files) as response:
                dates.append(response.headers["date"])
                lines.extend([line async for line in response.aiter_lines() if line])

    async def main() -> None:
        world.boot("web", _serve)
        await trio.sleep(0.1)
        await world.boot("user", ask).ended.wait()

    return world.run(main), lines, dates[0]


def test_hypercorn_and_httpx_stream_tokens_in_a_world() -> None:
    digest, lines, date = _stream_over_http(1)
    assert lines == [f"data: {number}" for number in range(TOKENS)]
    assert date == "Tue, 14 Nov 2023 22:13:20 GMT", "the virtual clock's"
    assert _stream_over_http(1)[0] == digest
    assert _stream_over_http(2)[0] != digest


def test_prometheus_metrics_may_be_made_during_a_run() -> None:
    registry = prometheus_client.CollectorRegistry()
    requests = prometheus_client.Counter("requests", "x", ["host"], registry=registry)

    async def main() -> None:
        await trio.sleep(5)
        requests.labels("a").inc()

    World(SeedChoices(1)).run(main)
    created = registry.get_sample_value("requests_created", {"host": "a"})
    assert created == 1_700_000_005.0


def test_the_log_stamps_virtual_time() -> None:
    stream = io.StringIO()
    log = logging.getLogger("tests.sim.stamps")
    log.addHandler(LogHandler(stream, JsonFormat()))

    async def main() -> None:
        await trio.sleep(2)
        log.warning("hello")

    World(SeedChoices(1)).run(main)
    assert json.loads(stream.getvalue())["time"] == "2023-11-14T22:13:22.000Z"


def test_a_clock_that_our_own_code_bound_early_still_raises() -> None:
    module = types.ModuleType("own_early")
    exec("from time import monotonic\ndef read():\n    return monotonic()", vars(module))
    sys.modules["own_early"] = module

    async def main() -> None:
        module.read()

    try:
        with pytest.raises(Escape, match=r"time\.monotonic\n.*in read"):
            World(SeedChoices(1), ambient="raise").run(main)
        assert module.read() > 0, "real again after the run"
    finally:
        del sys.modules["own_early"]


def test_a_module_first_imported_during_a_run_keeps_no_stand_in(tmp_path: Any) -> None:
    (tmp_path / "late_import.py").write_text("from time import time\n")
    sys.path.insert(0, str(tmp_path))
    found: list[Any] = []

    async def main() -> None:
        import late_import  # type: ignore[import-not-found]

        found.append(late_import)

    try:
        World(SeedChoices(1)).run(main)
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("late_import", None)
    assert found[0].time() > 1_700_000_100


def test_a_library_may_format_the_clock(tmp_path: Any) -> None:
    """As access logs do; our own code may not, where the world was made with `raise`."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    code = "import time\ndef read():\n    return time.strftime('%H:%M'), time.localtime(), time.ctime()\n"
    (folder / "stamping_library.py").write_text(code)
    sys.path.insert(0, str(folder))
    seen: list[Any] = []

    async def main() -> None:
        import stamping_library  # type: ignore[import-not-found]

        await trio.sleep(60)
        seen.extend(stamping_library.read())

    async def formats_itself() -> None:
        time.strftime("%H")

    try:
        World(SeedChoices(1), ambient="raise").run(main)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("stamping_library", None)
    at = time.localtime(1_700_000_060)
    assert seen == [time.strftime("%H:%M", at), at, time.ctime(1_700_000_060)]
    with pytest.raises(Escape, match=r"time\.strftime without a time\n.*in formats_itself"):
        World(SeedChoices(1), ambient="raise").run(formats_itself)


def test_a_module_imported_in_the_middle_of_a_run_draws_no_dice_of_it(tmp_path: Any) -> None:
    """Else the first run of a process would differ from the second, which finds it loaded."""
    code = "import os, random\nDRAWN = random.random(), os.urandom(4), random.Random().random()\n"
    (tmp_path / "drawing_at_its_top.py").write_text(code)
    sys.path.insert(0, str(tmp_path))
    drawn: list[Any] = []

    async def main() -> None:
        import drawing_at_its_top  # type: ignore[import-not-found]

        drawn.append((drawing_at_its_top.DRAWN, random.random(), os.urandom(4)))

    try:
        digests = [World(SeedChoices(1)).run(main) for _ in range(2)]
        del sys.modules["drawing_at_its_top"]
        World(SeedChoices(2)).run(main)
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("drawing_at_its_top", None)
    assert digests[0] == digests[1]
    assert drawn[0] == drawn[1]
    assert drawn[2][0] == drawn[0][0], "of its name, whichever run is the first to import it"
    assert drawn[2][1:] != drawn[0][1:]


def test_a_library_does_the_same_from_a_checkout_as_installed(tmp_path: Any) -> None:
    code = """
import random, threading, time, uuid
from datetime import datetime
from time import perf_counter
def facts():
    stamps = time.time(), time.monotonic(), perf_counter(), time.strftime("%H:%M")
    return *stamps, datetime.now(), random.uniform(0, 1), uuid.uuid4()
"""
    seen: list[Any] = []

    async def main() -> None:
        import placed_library  # type: ignore[import-not-found]

        await trio.sleep(1)
        seen.append(placed_library.facts())

    for place in ("checkout", "site-packages"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "placed_library.py").write_text(code)
        sys.path.insert(0, str(tmp_path / place))
        try:
            World(SeedChoices(1)).run(main)
        finally:
            del sys.path[0]
            sys.modules.pop("placed_library", None)
    assert seen[0] == seen[1]
    assert seen[0][:3] == (1_700_000_001.0, 1.0, 1.0)


def test_who_calls_is_the_first_frame_outside_the_standard_library() -> None:
    def frame(name: str, filename: str, back: Any) -> Any:
        return types.SimpleNamespace(
            f_globals={"__name__": name},
            f_code=types.SimpleNamespace(co_filename=filename),
            f_back=back,
        )

    own = frame("trinamo.runtime.worker.worker", "/venv/lib/site-packages/trinamo/x.py", None)
    library = frame("prometheus_client.metrics", "/venv/lib/site-packages/p/m.py", own)
    assert is_library_calling(library)
    assert not is_library_calling(own), "ours, installed or not"
    assert is_library_calling(frame("uuid", "/usr/lib/uuid.py", library))
    assert not is_library_calling(frame("uuid", "/usr/lib/uuid.py", own))
    assert not is_library_calling(frame("scenario", "/home/me/scenario.py", library))
    assert not is_library_calling(None)
