"""A power cut leaves what was synced, and of the rest only what a disk can leave."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given, settings, strategies as st

from trinamo.sim import ReplayChoices, World

DO = st.sampled_from(("append", "append", "sync", "replace", "kill", "power"))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(steps=st.lists(DO, max_size=14), values=st.lists(st.integers(0, 9), max_size=12))
def test_what_was_synced_survives_and_the_rest_is_lost_or_torn(
    steps: list[str], values: list[int]
) -> None:
    """After a cut: the synced content, with a part from the front of what was appended since; or
    the content it was replaced with. A kill loses nothing."""
    world = World(ReplayChoices(values), policy="fifo")

    async def main() -> None:
        disk = world.disk("a")
        durable = content = b""
        await disk.append("log", b"")
        for number, do in enumerate(steps):
            record = b"%d;" % number * 3
            if do == "append":
                await disk.append("log", record)
                content += record
            elif do == "replace":
                await disk.replace("log", record)
                content = record
            elif do == "sync":
                await disk.sync("log")
                durable = content
            elif do == "kill":
                world.boot("a", trio.sleep_forever)
                world.kill("a")
                assert disk.read("log") == content
            else:
                world.boot("a", trio.sleep_forever)
                world.power_off("a")
                left = disk.read("log") if disk.paths() else b""
                if content.startswith(durable):
                    assert left.startswith(durable)
                    assert content.startswith(left)
                else:
                    assert left in (durable, content)
                durable = content = left
                await disk.append("log", b"")
            assert disk.read("log") == content

    world.run(main)
