"""The tasks of each process, in a real Chromium before a real frontend: who is told, and what is drawn."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import needs
from tests.runtime.small_cluster import open_small_cluster
from tests.runtime.view.pages import Shown
from tests.sim.report.browser import CHROMIUM, Browser, browser
from trinamo.runtime.view.pages import Tabs

pytestmark = [pytest.mark.check, needs.CHROMIUM.unless(CHROMIUM is not None)]

TASKS = "document.querySelector('#tasks')"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


async def test_the_tasks_of_each_process_are_drawn(chromium: Browser) -> None:
    """A real frontend and a real worker: where a task waits, and for how long, by a click."""
    async with open_small_cluster() as cluster:
        found = Shown(chromium, Tabs())
        await found.open(str(cluster.status[0].base_url.join("/dashboard")))
        worker = (
            f"document.querySelector('#tasks option[value=\"{cluster.workers[0].instance_id}\"]')"
        )
        await found.until(f"{worker} !== null")
        await found.evaluate("document.querySelector('#tasks button').click()")
        await found.until(f"{TASKS}.querySelector('.tree').innerText.includes('TaskTree.follow')")
        # The last in the tree are deep in nurseries, and each says where it waits.
        assert await found.evaluate(f"{TASKS}.querySelectorAll('.tree ul ul li code').length") > 10
        assert f"of pid {os.getpid()}" in await found.evaluate(f"{TASKS}.innerText")
        await found.evaluate(f"{worker}.selected = true")
        await found.evaluate(f"{TASKS}.querySelector('.tree').replaceChildren()")
        await found.evaluate(f"{TASKS}.querySelector('select').dispatchEvent(new Event('change'))")
        await found.until(f"{TASKS}.querySelector('.tree').innerText.includes('Worker.run')")
        assert chromium.errors == []
        await found.run(chromium.open, "about:blank")


async def test_where_clients_need_keys_the_page_asks_for_an_operator_s(
    chromium: Browser, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: sk-alice-0123456789\nbob (operator): sk-bob-0123456789\n", "ascii")
    keys.chmod(0o600)
    async with open_small_cluster(http__api_keys_file=str(keys), http__dashboard=True) as cluster:
        found = Shown(chromium, Tabs())
        await found.open(str(cluster.http.base_url.join("/dashboard")))
        for key, words in (
            ("", "a key is needed"),
            ("sk-alice-0123456789", "the key of an operator"),
            ("sk-bob-0123456789", "tasks of pid"),
        ):
            typed = f"{TASKS}.querySelector('input').value = {json.dumps(key)}"
            await found.evaluate(typed)
            await found.evaluate(f"{TASKS}.querySelector('button').click()")
            await found.until(f"{TASKS}.querySelector('.note').innerText.includes('{words}')")
            assert await found.evaluate(f"{TASKS}.querySelector('.key').hidden") is False
            rows = await found.evaluate(f"{TASKS}.querySelectorAll('.tree li').length")
            assert (rows > 0) is key.startswith("sk-bob")
        await found.run(chromium.open, "about:blank")
