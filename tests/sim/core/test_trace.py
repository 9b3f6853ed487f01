from __future__ import annotations

import enum

import pytest
import trio

from trinamo.sim import Network, SeedChoices, SimEnv, Trace, World, first_difference


def test_equal_rows_give_equal_digests_and_others_do_not() -> None:
    def trace(size: int) -> Trace:
        made = Trace()
        made.add(0.5, "a.1", "send", {"size": size})
        return made

    assert trace(1).digest == trace(1).digest
    assert trace(1).digest != trace(2).digest
    assert first_difference(trace(1), trace(1)) == ""
    assert "row 0" in first_difference(trace(1), trace(2))


def test_a_shorter_trace_differs_where_it_ends() -> None:
    longer, shorter = Trace(), Trace()
    longer.add(0, "a", "x", {})
    assert "None" in first_difference(longer, shorter)


def test_values_without_an_order_or_with_an_address_are_refused() -> None:
    trace = Trace()
    for value in ({1, 2}, object()):
        with pytest.raises(TypeError, match="plain values only"):
            trace.add(0, "a", "x", {"value": value})


def test_nested_plain_values_are_frozen() -> None:
    class Colour(enum.Enum):
        RED = 1

    trace = Trace()
    trace.add(0, "a", "x", {"value": [Colour.RED, {"b": 1, "a": bytearray(b"z")}, None, 1.5]})
    assert trace.rows[0].field("value") == ("RED", (("a", b"z"), ("b", 1)), None, 1.5)


def test_a_muted_trace_takes_nothing_and_an_unkept_one_only_the_digest() -> None:
    trace = Trace(keep=False)
    empty = trace.digest
    trace.add(0, "a", "x", {})
    assert (trace.count, trace.rows) == (1, [])
    before = trace.digest
    assert before != empty
    trace.is_muted = True
    trace.add(1, "a", "y", {})
    assert trace.digest == before


def test_rows_are_found_by_kind() -> None:
    trace = Trace()
    for kind in ("a", "b", "a"):
        trace.add(0, "h", kind, {})
    assert len(trace.of_kind("a")) == 2


def test_what_a_trace_tells_leaves_out_steps_and_arrivals() -> None:
    trace = Trace()
    for kind in ("step", "note", "arrive"):
        trace.add(0, "h", kind, {})
    assert [row.kind for row in trace.told] == ["note"]
    assert [row.kind for row in trace.rows] == ["step", "note", "arrive"]


@pytest.mark.parametrize("value", [1 << 70, -(1 << 70), "\ud800"])
def test_a_value_beyond_what_the_encoding_holds_has_a_digest_too(value: int | str) -> None:
    def digest(size: int | str) -> str:
        trace = Trace()
        trace.add(0, "h", "x", {"size": size})
        return trace.digest

    assert digest(value) == digest(value) != digest(0)


def _digest(payload: bytes, draws: int, decisions: int = 0) -> str:
    """Of a run that sends some bytes and draws some dice, and shows neither otherwise."""
    world = World(SeedChoices(1))
    Network(world)

    async def take(stream: trio.SocketStream) -> None:
        async for _ in stream:
            pass

    async def main() -> None:
        world.boot("server", trio.serve_tcp, take, 80)
        await trio.sleep(0.1)
        env = SimEnv(world, "client")
        for _ in range(draws):
            env.rng.random()
        for _ in range(decisions):
            world.choices.below(2, "idle")
        async with await trio.open_tcp_stream("server", 80) as stream:
            await stream.send_all(payload)
            await trio.sleep(1)

    return world.run(main)


def test_the_digest_covers_bytes_and_dice_that_change_nothing_else() -> None:
    plain = _digest(b"one", 0)
    assert _digest(b"one", 0) == plain
    assert _digest(b"two", 0) != plain
    assert _digest(b"one", 1) != plain
    assert _digest(b"one", 1) != _digest(b"one", 1 + 624 // 2)
    assert _digest(b"one", 0, decisions=1) != plain
