"""What the bytes of a segment say, in the trace: `network.describe`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio

from trinamo.sim import Network, SeedChoices, World


def labels(describe: Callable[[bytes], str | None] | None) -> list[str]:
    world = World(SeedChoices(1))
    network = Network(world)
    network.describe = describe

    async def answer(stream: trio.SocketStream) -> None:
        async for chunk in stream:
            await stream.send_all(chunk.upper())

    async def ask() -> None:
        async with await trio.open_tcp_stream("server", 7000) as stream:
            await stream.send_all(b"hello")
            await stream.receive_some()

    async def main() -> None:
        world.boot("server", trio.serve_tcp, answer, 7000)
        await trio.sleep(0.1)
        await world.boot("client", ask).ended.wait()

    world.run(main)
    rows = [dict(row.fields) for row in world.trace.of_kind("arrive")]
    return [str(row["label"]) for row in rows if "label" in row]


@pytest.mark.parametrize(
    ("describe", "found"),
    [
        (None, []),
        (lambda _: None, []),
        (bytes.decode, ["hello", "HELLO"]),
        (lambda data: "long " * 100 if data == b"hello" else None, [("long " * 100)[:60]]),
        (lambda data: str(data[9]), ["not described: IndexError"] * 2),
    ],
)
def test_a_segment_has_the_label_that_describe_gives_its_bytes(
    describe: Callable[[bytes], str | None] | None, found: list[str]
) -> None:
    assert labels(describe) == found
