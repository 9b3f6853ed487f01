"""The processes of a `trinamo up` restarted in turn, each with SIGTERM, under load: no client notices."""

from __future__ import annotations

import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Final

import attrs
import httpx
import pytest
import trio

from tests.cli.places import Place, cluster
from tests.cluster.processes import until
from tests.machines.test_rollout import ENGINE, EXACT, SHORT, question
from tests.soak.asking import Answer, Outcome, ask_in_time, judged
from trinamo.transports.assembly.run_file import ProcessEntry, find_runs

pytestmark = [
    # httpx leaves generators of its own to the garbage collector when a stream is left.
    pytest.mark.filterwarnings("ignore:.*(httpx|httpcore|Response.aiter).*"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SETTINGS: Final = ("http.lame_duck_s=10", "http.drain_timeout_s=30", "shutdown.drain_timeout_s=30")
"""An answer takes half a second, several on a busy machine, and its connection ends with the next one."""
ASKERS: Final = 3
"""Of each kind."""


@attrs.define
class Load:
    """Clients that ask one thing for ever, and what became of it."""

    url: str
    right: Counter[tuple[bool, bool]] = attrs.field(factory=Counter)
    bad: list[str] = attrs.field(factory=list)

    async def ask_for_ever(self, whole: Answer, *, is_kept: bool, is_streamed: bool) -> None:
        limits = httpx.Limits(max_keepalive_connections=1 if is_kept else 0)
        async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
            number = 0
            while True:
                number += 1
                asked = question(EXACT, SHORT)
                answer, _ = await ask_in_time(
                    client, self.url, asked, request_id=f"n{number}", is_streamed=is_streamed
                )
                outcome = judged(answer, whole)
                if outcome is Outcome.RIGHT:
                    self.right[is_kept, is_streamed] += 1
                else:
                    said = answer.error or answer.broken or answer.status
                    self.bad.append(f"{outcome}: kept {is_kept}, streamed {is_streamed}: {said}")


async def test_no_client_of_up_notices_that_its_processes_are_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "paced.py").write_text(ENGINE)
    place = Place(tmp_path)
    words = ["--engine", f"{tmp_path}/paced.py:engine", "--workers", "2"]
    words += ["--frontend-processes", "2"]
    words += [word for each in SETTINGS for word in ("--set", each)]
    monkeypatch.setenv("XDG_RUNTIME_DIR", place.environ["XDG_RUNTIME_DIR"])
    with cluster(place, *words) as running:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            whole, _ = await ask_in_time(
                client, running.url, question(EXACT, SHORT), request_id="whole", is_streamed=False
            )
        (tmp_path / "paced").touch()
        load = Load(running.url)
        async with trio.open_nursery() as nursery:
            for is_kept in (True, False):
                for is_streamed in (True, False):
                    for _ in range(ASKERS):
                        nursery.start_soon(
                            partial(
                                load.ask_for_ever, whole, is_kept=is_kept, is_streamed=is_streamed
                            )
                        )
            for name in ("worker-1", "worker-2", "etcd", "nats", "frontend-1", "frontend-2"):
                await restart(name)
            nursery.cancel_scope.cancel()
    assert load.bad == []
    assert len(load.right) == 4


def entry(name: str) -> ProcessEntry:
    (run,) = find_runs()
    [found] = (each for each in run.processes if each.name == name)
    return found


async def restart(name: str) -> None:
    """SIGTERM, and the wait until what was started in its place is ready."""
    old = entry(name)
    os.kill(old.pid, signal.SIGTERM)

    async def is_back() -> bool:
        new = entry(name)
        return new.pid not in (0, old.pid) and await answers(new.url)

    await until(is_back, f"{name} is back", timeout_s=180)


async def answers(url: str) -> bool:
    if not url:
        return True
    async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
        try:
            return (await client.get(f"{url}/health")).status_code == 200
        except httpx.TransportError:
            return False
