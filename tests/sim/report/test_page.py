"""What the page of a run is made of, short of a browser."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import trio

from trinamo.sim import (
    Choices,
    Linearizability,
    Network,
    ReplayChoices,
    SeedChoices,
    World,
    page_of,
)
from trinamo.sim.core.trace import Row
from trinamo.sim.explore import played
from trinamo.sim.report import BYTES_MAX, About, Decision, events_of, page, pair
from trinamo.sim.report.events import request_of


def row(time_s: float, host: str, kind: str, /, **fields: object) -> Row:
    return Row(time_s, host, kind, tuple(fields.items()))  # type: ignore[arg-type]


def boot(host: str, time_s: float = 0.0) -> Row:
    return row(time_s, "driver", "boot", host=host, generation=1)


def segment(kind: str, time_s: float, number: int = 1, **more: object) -> Row:
    return row(
        time_s,
        "driver",
        kind,
        connection=1,
        source="a",
        segment="data",
        number=number,
        size=5,
        **more,
    )


CONNECTED = [
    boot("a"),
    boot("b"),
    row(0.1, "driver", "connect", connection=1, source="a", target="b"),
]


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def test_a_segment_goes_from_where_it_was_sent_to_the_other_end() -> None:
    events = events_of([*CONNECTED, segment("arrive", 0.3, sent_s=0.25)])
    message = events.messages[-1]
    assert (message.source, message.target) == ("a", "b")
    assert (message.sent_s, message.land_s) == (0.25, 0.3)


def test_a_held_segment_keeps_its_send_time_until_it_lands() -> None:
    events = events_of([*CONNECTED, segment("held", 0.2), segment("arrive", 3.0)])
    message = events.messages[-1]
    assert (message.sent_s, message.land_s, message.fate) == (0.2, 3.0, "held back by a cut")


def test_a_lost_segment_never_lands() -> None:
    message = events_of([*CONNECTED, segment("lost", 0.2)]).messages[-1]
    assert (message.land_s, message.fate) == (None, "lost")


def test_a_bus_message_lands_is_dropped_or_lands_twice() -> None:
    def bus(kind: str, time_s: float, number: int, **more: object) -> Row:
        return row(time_s, "driver", kind, number=number, source="a", target="b", **more)

    events = events_of(
        [
            bus("send", 0.1, 1, channel="c", payload="x"),
            bus("deliver", 0.2, 1),
            bus("deliver", 0.3, 1),
            bus("send", 0.4, 2, channel="c", payload="y"),
            bus("drop", 0.4, 2),
        ]
    )
    assert [(m.land_s, m.fate) for m in events.messages] == [
        (0.2, ""),
        (0.3, "delivered again"),
        (None, "drop"),
    ]


def test_faults_become_bands_from_their_beginning_to_their_end() -> None:
    events = events_of(
        [
            boot("a"),
            boot("b"),
            row(1.0, "driver", "cut", source="a", target="b", one_way=False),
            row(1.5, "driver", "pause", host="b"),
            row(2.0, "driver", "heal", source="a", target="b"),
            row(2.5, "driver", "resume", host="b"),
            row(3.0, "driver", "kill", host="b", generation=1),
            boot("b", 4.0),
        ],
        end_s=5.0,
    )
    bands = {(b.host, b.kind, b.start_s, b.end_s) for b in events.bands}
    assert bands == {
        ("a", "cut", 1.0, 2.0),
        ("b", "cut", 1.0, 2.0),
        ("b", "paused", 1.5, 2.5),
        ("b", "down", 3.0, 4.0),
    }
    assert [life[1:3] for life in events.lives if life[0] == "b"] == [(0.0, 3.0), (4.0, 5.0)]


def test_a_cut_between_patterns_strikes_every_host_they_mean() -> None:
    hosts = [boot(f"worker{n}") for n in range(4)]
    events = events_of(
        [
            *hosts,
            boot("store"),
            row(1.0, "driver", "cut", source="worker*", target="store", one_way=False),
        ],
        end_s=2.0,
    )
    assert {b.host for b in events.bands} == {"store", *(f"worker{n}" for n in range(4))}
    assert [b.kind for b in events.bands if b.host == "store"] == ["isolated"]


def test_tokens_of_one_request_are_one_note_with_a_count() -> None:
    tokens = [row(n / 10, "w.1", "engine.token", request="r", index=n) for n in range(5)]
    notes = events_of([*tokens, row(0.6, "w.1", "engine.end", request="r")]).notes
    assert [(n.kind, n.count, n.last_s) for n in notes] == [
        ("engine.token", 5, 0.4),
        ("engine.end", 1, 0.6),
    ]


@pytest.mark.parametrize(
    ("fields", "request_name"),
    [
        ({"request": "client0.1"}, "client0.1"),
        ({"request": "client0.1-9f.53"}, "client0.1"),
        ({"id": "client2.0-08"}, "client2.0"),
        ({"job": 3}, "job 3"),
        ({"request": 5}, ""),
        ({}, ""),
    ],
)
def test_a_note_names_its_request(fields: dict[str, object], request_name: str) -> None:
    assert request_of(row(0.0, "w.1", "x", **fields)) == request_name


def test_the_way_home_that_a_worker_opens_belongs_to_the_request_it_began() -> None:
    events = events_of(
        [
            boot("worker0"),
            boot("frontend0"),
            row(0.1, "worker0.1", "worker.begin", request="r1-7f.1"),
            row(0.2, "driver", "connect", connection=9, source="worker0", target="frontend0"),
            row(
                0.3,
                "driver",
                "arrive",
                connection=9,
                source="worker0",
                segment="data",
                number=1,
                size=1,
            ),
        ]
    )
    assert [m.request for m in events.messages] == ["r1", "r1"]


def test_too_much_is_cut_to_the_latest_and_the_page_says_so() -> None:
    rows = [row(n / 1000, "w.1", "note", text="x" * 200) for n in range(30_000)]
    text = page(rows, About(title="big"), bytes_max=300_000)
    assert len(text.encode()) <= 300_000
    data = data_of(text)
    assert "Left out" in str(data["omitted"])
    notes = data["notes"]
    assert isinstance(notes, list)
    assert notes[-1][0] == 29.999


@pytest.mark.check
def test_a_page_is_at_most_two_megabytes() -> None:
    rows = [row(n / 1000, f"h{n % 50}.1", f"kind{n}", text="é" * 290) for n in range(40_000)]
    assert len(page(rows, About(title="big")).encode()) <= BYTES_MAX


def test_the_page_asks_for_nothing_outside_itself() -> None:
    text = page([boot("a")], About(title="t"))
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)""", text)
    assert "default-src 'none'" in text.replace("&#x27;", "'")
    assert "http" not in text.replace("http-equiv", "").replace(
        "http://www.w3.org/2000/svg", ""
    ).replace("http.answered", "")


def test_no_text_of_a_run_can_end_the_data() -> None:
    hostile = "</script><!--<script>&amp;\u2028\ud800"
    text = page([row(0.0, "a.1", hostile, x=hostile)], About(title=hostile, text=hostile))
    assert text.count("</script>") == 2
    assert data_of(text)["title"] == hostile
    text.encode()


def test_an_empty_trace_has_a_page_too() -> None:
    assert data_of(page([], About(title="nothing")))["messages"] == []


def test_an_arrow_has_the_label_that_the_network_gave_it_or_its_channel() -> None:
    events = events_of([*CONNECTED, segment("arrive", 0.3, label="append 7")])
    assert events.messages[-1].label == "append 7"
    sent = row(0.1, "driver", "send", number=1, source="a", target="b", channel="vote", payload="x")
    assert events_of([sent]).messages[-1].label == "vote"


def test_a_client_s_operations_are_bars_beside_its_lifeline_with_what_they_returned() -> None:
    events = events_of(
        [
            *CONNECTED,
            row(0.2, "a.1", "operation", client="reader", called=1, text="read()"),
            row(0.3, "a.1", "operation", client="b", called=2, text="write(7)"),
            row(0.5, "a.1", "operation.end", called=1, text="'x'"),
        ],
        end_s=2.0,
    )
    bars = [(each.host, each.start_s, each.end_s, each.text) for each in events.bands]
    assert bars == [("a", 0.2, 0.5, "read() → 'x'"), ("b", 0.3, 2.0, "write(7) → no return")]


def test_a_run_with_connections_says_when_each_segment_was_sent() -> None:
    world = World(SeedChoices(1))
    network = Network(world, latency_s=0.25, jitter_s=0.0)
    history = world.watch(Linearizability())

    async def serve(stream: trio.SocketStream) -> None:
        await stream.send_all(b"x")

    async def ask() -> None:
        read = history.call("client", "read")
        async with await trio.open_tcp_stream("server", 7000) as stream:
            await stream.receive_some()
        history.ends(read)

    async def main() -> None:
        world.boot("server", trio.serve_tcp, serve, 7000)
        await trio.sleep(0.1)
        await world.boot("client", ask).ended.wait()

    world.run(main)
    events = events_of(world.trace.rows)
    connect = next(each for each in events.messages if each.kind == "connect")
    assert (connect.sent_s, connect.land_s) == (0.1, 0.35)
    assert [(each.host, each.text) for each in events.bands] == [("client", "read() → None")]
    assert network.world is world


def _asked(choices: Choices) -> None:
    """A client asks twice, and the server counts."""
    world = World(choices)
    network = Network(world)
    network.describe = lambda data: data.decode()

    async def serve() -> None:
        async def answer(stream: trio.SocketStream) -> None:
            async for data in stream:
                asked.append(data)
                world.note("asked", count=len(asked), by="</script>")
                await stream.send_all(b"fine")

        await trio.serve_tcp(answer, 7000)

    async def ask() -> None:
        stream = await trio.open_tcp_stream("server", 7000)
        for _ in range(2):
            await trio.sleep(0.1)
            await stream.send_all(b"well?")
            await stream.receive_some()
        world.note("done")

    async def main() -> None:
        world.boot("server", serve)
        await world.boot("client", ask).ended.wait()

    asked: list[bytes | bytearray] = []
    world.run(main)


def test_a_page_says_what_led_to_each_note_from_host_to_host() -> None:
    drawn = played(_asked, SeedChoices(1), to_draw=True)
    data = data_of(page_of("asked", drawn))
    kinds = data["kinds"]
    steps = data["lineage"]
    hosts = data["hosts"]
    done = next(note for note in data["notes"] if kinds[note[2]] == "done")
    path: list[tuple[str, object]] = []
    step = done[-1]
    while step >= 0:
        path.append((hosts[steps[step][1]], steps[step][4]))
        step = steps[step][3]
    assert path[:4] == [
        ("client", "fine from server"),
        ("server", "well? from client"),
        ("client", "its time had come"),
        ("client", "fine from server"),
    ]


def test_looking_for_causes_changes_nothing_in_a_run() -> None:
    runs = [played(_asked, SeedChoices(5), to_draw=to_draw) for to_draw in (False, True)]
    assert runs[0].run == runs[1].run
    assert runs[0].steps is None


def test_numbers_in_notes_are_values_over_time() -> None:
    data = data_of(page_of("asked", played(_asked, SeedChoices(1))))
    assert [(name, [value for _, value in series]) for _, name, series in data["values"]] == [
        ("asked count", [1, 2])
    ]


def test_the_few_decisions_of_a_shrunk_run_are_shown_with_link_and_message() -> None:
    whole = played(_asked, SeedChoices(1))
    asking = next(
        number
        for number, (_, host, about) in whole.places.items()
        if about == "client → server" and host == "client.1" and whole.places[number][0] > 0.1
    )
    values = [0] * len(whole.record)
    values[asking] = 7
    data = data_of(page_of("asked", played(_asked, ReplayChoices(values, 1))))
    ((_, host, label, value, n, struck),) = data["decisions"]
    assert (host, label, value, n, struck) == (
        "client.1",
        "jitter",
        7,
        16,
        "client → server: well?",
    )


def test_many_decisions_are_left_for_shrinking() -> None:
    decisions = tuple(Decision(0.0, "a", "", "jitter", 16, 1) for _ in range(1000))
    assert data_of(page([boot("a")], About(title="t", decisions=decisions)))["decisions"] == []


def test_two_pages_stand_side_by_side_and_stay_sealed() -> None:
    one = page([boot("a")], About(title="<b>"))
    text = pair(("<b>", "x"), (one, one), "</pre><script>alert(1)</script>")
    assert "<script" not in text
    assert text.count("<iframe ") == 2
    assert text.count("&lt;!doctype html&gt;") == 2
