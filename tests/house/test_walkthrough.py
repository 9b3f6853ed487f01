"""The walkthrough names what a request really runs, in the order in which it does."""

from __future__ import annotations

import re

import pytest
import trio

from tests.house.figures import TOKENS, WARM_UP, ask, walked
from tests.runtime.small_cluster import open_small_cluster
from tests.sources import ROOT

ENDLESS = 4000
"""Tokens: a client that leaves at the first of them leaves in the middle."""
ROW = re.compile(r"^\| \d? ?\| ([^|]+) \| `([\w./]+\.py)` \| (`[^|]+`) \|$", re.MULTILINE)


def steps(heading: str) -> list[tuple[str, str, str]]:
    """Of the table under a heading: what happens, in which file, in which function."""
    page = (ROOT / "docs" / "walkthrough.md").read_text("utf-8")
    table = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [row for row in table.splitlines() if row.startswith("|")][2:]
    found = ROW.findall("\n".join(rows))
    assert len(found) == len(rows) > 0, "a row is not | | hop | `file` | `function` |"
    return [
        (hop, file, function)
        for hop, file, names in found
        for function in names[1:-1].split("`, `")
    ]


@pytest.mark.parametrize("is_left", [False, True])
async def test_a_streamed_chat_runs_the_functions_of_the_tables_in_their_order(
    is_left: bool,
) -> None:
    wanted = steps("The way back" if is_left else "The hops")
    async with open_small_cluster(http__dashboard=False) as cluster:
        port = cluster.http.base_url.port
        assert port is not None
        for _ in range(WARM_UP):
            await trio.to_thread.run_sync(ask, port, TOKENS, True)
        tokens = ENDLESS if is_left else TOKENS
        calls = (await walked(port, tokens, True, is_left, last=wanted[-1][1:])).calls

    # Of the way back it counts from where it begins.
    begun = calls.index(wanted[0][1:]) if is_left else 0
    first: dict[tuple[str, str], int] = {}
    for number, call in enumerate(calls[begun:]):
        first.setdefault(call, number)
    never = [f"{hop}: {file} {name}" for hop, file, name in wanted if (file, name) not in first]
    assert not never, "no chat runs: " + "; ".join(never)
    order = sorted(wanted, key=lambda step: first[step[1], step[2]])
    assert wanted == order, "\n".join(["in this order:", *(f"{f} {n}" for _, f, n in order)])
