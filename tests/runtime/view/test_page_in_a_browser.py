"""The page in a real Chromium: it shows, is read and used, comes back, and runs no stranger's code."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from functools import partial

import attrs
import msgspec
import pytest

from tests import needs
from tests.runtime.view import pages
from tests.sim.report.browser import CHROMIUM, Browser, browser
from trinamo.runtime.planes import ControlStatistics, EventStatistics
from trinamo.runtime.traces.ring import RequestView
from trinamo.runtime.view.facts import EngineFacts, QueueFacts
from trinamo.runtime.view.listing import ModelLook
from trinamo.runtime.view.pages import Tabs
from trinamo.runtime.view.rows import SINGLY_MAX, BackendRow, InstanceRow, grouped
from trinamo.runtime.view.snapshot import ClusterSnapshot, FrontendRow, QueueRow
from trinamo.runtime.view.timeline import Event

pytestmark = [pytest.mark.check, needs.CHROMIUM.unless(CHROMIUM is not None)]

HOSTILE = "<img src=x onerror='window.stolen=1'><script>window.stolen=1</script>"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


def worker(number: int, name: str, state: str = "ready", role: str = "decode") -> InstanceRow:
    facts = EngineFacts(running=3, waiting=number, blocks_used=10, blocks_free=30, preemptions=7)
    return InstanceRow(
        id=f"{number:016x}",
        name=name,
        endpoint="a/b/c",
        model=name,
        engine=name,
        role=role,
        group=f"{name} {role}",
        pid="7",
        state=state,
        problem="does not answer" if state == "away" else "",
        in_flight=3,
        active=3,
        addresses=["tcp 127.0.0.1:1"],
        engine_facts=facts if state == "ready" else None,
        blocks_used=10,
        blocks_total=40,
        hit_rate=0.5,
        tokens_per_s=903.0,
        backends=[BackendRow(backend=name, state=name, bytes_per_s=1e6)],
        moves={f"{3:016x}": 1e6} if number == 1 else {},
    )


def snapshot(name: str = "decode-1", *, away: str = "", at: float = 2e9) -> ClusterSnapshot:
    request = RequestView(id="0123456789abcdef" * 2, start=at - 1, leg=name, model=name)
    request.instance, request.process = f"{1:016x}", name
    failed = msgspec.structs.replace(request, end=at - 0.5, outcome=name)
    kinds = {"joined": None, "left": None, "outage": at - 10, "interruption": at - 5}
    instances = [
        worker(1, name),
        worker(2, f"{name} 2", "away" if away else "ready"),
        worker(3, f"{name} 3", role="prefill"),
    ]
    return ClusterSnapshot(
        number=1,
        at=at,
        interval_s=1.0,
        cluster=name,
        etcd_text=name,
        away=[away] if away else [],
        refused=[name],
        is_last_known=False,
        control=ControlStatistics(
            is_connected=True, watches=3, stream_losses=0, resyncs=0, silence_s=0.5
        ),
        broker=EventStatistics(
            is_connected=True, connections=1, waiting_messages=0, dropped_outgoing=0, dropped_incoming=0
        ),
        addresses={"etcd": [name], "NATS": [name]},
        frontends=[
            FrontendRow(
                name=name, pid=1, url=name, status="ready", is_own=True, in_flight=6, waiting=2,
                requests_per_s=2.0, failures_per_s=0.5, tokens_per_s=903.0,
                first_token={"0.1": 0, "0.2": 10, "+Inf": 10}, gaps={"0.01": 90, "0.02": 100, "+Inf": 100},
                minutes=[(int(at) - 240 + 60 * n, 60, n, 6000, 4) for n in range(3)],
            )
        ],
        instances=instances,
        instances_left_out=0,
        groups=grouped(instances),
        singly_max=SINGLY_MAX,
        models=[
            ModelLook(
                name=name, aliases=[name], engine=name, endpoint=name,
                context_tokens_max=4096, instances=2, registered=2, refused=0,
            )
        ],
        queues=[QueueRow(name=name, facts=QueueFacts(ready=4))],
        under_way=[request],
        under_way_left_out=0,
        failed=[failed],
        requests_max=10,
        events=[
            Event(number=n, at=at - 60 + n, kind=kind, who=name, about=name, text=name, until=until)
            for n, (kind, until) in enumerate(kinds.items())
        ],
    )  # fmt: skip


@pytest.fixture
async def shown(chromium: Browser) -> AsyncIterator[pages.Shown]:
    tabs = Tabs()
    async with pages.serving(tabs) as service:
        found = pages.Shown(chromium, tabs)
        await found.open(f"http://127.0.0.1:{service.port}/dashboard")
        yield found
        # Or its stream would be taken up again where the next test looks.
        await found.run(chromium.open, "about:blank")


async def test_it_shows_the_cluster_without_a_complaint(shown: pages.Shown) -> None:
    await shown.tell(snapshot())
    count = "document.querySelectorAll({}).length"
    assert await shown.evaluate(count.format("'#instances tbody tr'")) == 3
    assert await shown.evaluate(count.format("'#topology .node.worker'")) == 3
    # To the frontend, to both decode workers, and from the one that has blocks of the prefill worker.
    assert await shown.evaluate(count.format("'#topology .edge'")) == 4
    assert await shown.evaluate(count.format("'#topology .edge.blocks.flowing'")) == 1
    assert await shown.evaluate(count.format("'#happened .events li'")) == 4
    assert await shown.evaluate("document.querySelector('#tokens output').textContent") == "903"
    more = await shown.evaluate("document.querySelector('#flight output').dataset.more")
    assert more == "2 more wait for a place"
    assert await shown.evaluate("document.querySelector('#health').innerText") == "● all answer"
    assert shown.chromium.errors == []


async def test_latency_and_failures_are_of_all_frontends(shown: pages.Shown) -> None:
    """Each sum is over all; a model that is not served whole is not green."""
    told = snapshot()
    (one,) = told.frontends
    other = msgspec.structs.replace(
        one, name="other", is_own=False, first_token={"0.1": 90, "0.2": 90, "+Inf": 90}
    )
    model = attrs.evolve(told.models[0], instances=1)
    await shown.tell(msgspec.structs.replace(told, frontends=[one, other], models=[model]))
    text = "document.querySelector('#{} output').textContent"
    assert await shown.evaluate(text.format("failures")) == "1"
    # 90 of 100 within 0.1 s, the others within 0.2 s.
    assert await shown.evaluate(text.format("first")) == "56 ms"
    more = await shown.evaluate("document.querySelector('#first output').dataset.more")
    assert more == "median; 95 % within 150 ms"
    state = "document.querySelector('#models tbody tr').cells[2].innerText"
    assert await shown.evaluate(state) == "◐ 1 of 2"
    # The three minutes before this page was opened are drawn, and nothing is where nothing is known.
    path = "document.querySelector('#tokens .line').getAttribute('d')"
    assert (await shown.evaluate(path)).count("L") == 3
    axis = "document.querySelector('#tokens .axis').innerText"
    assert (await shown.evaluate(axis)).split() == ["5", "min", "ago", "now"]


async def test_points_that_are_far_apart_are_not_joined(shown: pages.Shown) -> None:
    """Two sessions of a page, minutes apart, are two lines."""
    told = snapshot()
    (one,) = told.frontends
    bare = msgspec.structs.replace(told, frontends=[msgspec.structs.replace(one, minutes=[])])
    for at in (2e9, 2e9 + 1, 2e9 + 300, 2e9 + 301):
        await shown.tell(msgspec.structs.replace(bare, at=at, etcd_text=f"{at}"))
        await shown.until(f"document.querySelector('#about').textContent.includes('{at}')")
    assert (
        await shown.evaluate("document.querySelector('#tokens .line').getAttribute('d')")
    ).count("M") == 2


async def test_failures_are_grouped_and_our_own_come_first(shown: pages.Shown) -> None:
    """A client that asks fourteen times for what is not there is one line."""
    told = snapshot()
    (request,) = told.failed

    def failed(number: int, outcome: str, model: str) -> RequestView:
        return msgspec.structs.replace(request, id=f"{number:032x}", outcome=outcome, model=model)

    theirs = [failed(number, "model_not_found", "one-that-nobody-serves") for number in range(14)]
    ours = [failed(99, "engine_failed", "m")]
    await shown.tell(msgspec.structs.replace(told, failed=[*theirs, *ours]))
    rows = await shown.evaluate(
        "[...document.querySelectorAll('#failed tbody tr')]"
        ".map(e => [...e.cells].slice(0, 3).map(c => c.innerText).join('|'))"
    )
    assert rows == ["engine failed|m|1", "model not found|one-that-nobody-serves|14"]


async def test_a_cluster_to_which_nothing_happened_says_so_and_then_tells(
    shown: pages.Shown,
) -> None:
    told = snapshot()
    nothing = msgspec.structs.replace(told, events=[])
    section = "document.querySelector('#happened').innerText"
    await shown.tell(nothing)
    assert "Nothing, as far as this frontend has seen" in await shown.evaluate(section)
    await shown.tell(told)
    # The instances are the same, and so are drawn already.
    await shown.until(f"!{section}.includes('Nothing')")
    width = "document.querySelector('#happened svg').getBoundingClientRect().width"
    assert await shown.evaluate(width) > 260


async def test_who_is_away_is_said_in_words_and_shapes(shown: pages.Shown) -> None:
    await shown.tell(snapshot(away="instance 2 does not answer"))
    assert await shown.evaluate("document.querySelector('#away').innerText.includes('instance 2')")
    state = "document.querySelectorAll('#instances tbody tr')[1].cells[1].innerText"
    assert await shown.evaluate(state) == "✕ away"
    node = "document.querySelector('#topology .node.bad')"
    assert "away" in await shown.evaluate(f"{node}.getAttribute('aria-label')")
    assert await shown.evaluate(f"{node}.querySelector('.mark').textContent") == "✕"
    assert await shown.evaluate("document.title.startsWith('✕')")


async def test_what_strangers_call_themselves_is_shown_and_never_run(shown: pages.Shown) -> None:
    await shown.tell(snapshot(HOSTILE, away=HOSTILE))
    assert await shown.evaluate("document.querySelector('#away li').textContent") == HOSTILE
    assert await shown.evaluate("document.querySelectorAll('img').length") == 1, "our own"
    assert await shown.evaluate("document.querySelectorAll('script').length") == 1, "our own"
    assert await shown.evaluate("typeof window.stolen") == "undefined"
    assert shown.chromium.errors == []


def fleet(number: int = 1) -> ClusterSnapshot:
    """A thousand instances of two roles, 256 of them one by one; eight do not answer, and blocks move."""
    every = [
        msgspec.structs.replace(
            worker(
                n, f"w-{n}", "away" if n % 125 == 0 else "ready", "decode" if n % 4 else "prefill"
            ),
            model="m",
            group=f"m {'decode' if n % 4 else 'prefill'}",
            moves={f"{n - 1:016x}": 1e6} if n % 4 == 1 else {},
        )
        for n in range(1000)
    ]
    told = snapshot()
    (one,) = told.frontends
    streams = {"m decode": 700, "m prefill": 100}
    return msgspec.structs.replace(
        told,
        etcd_text=f"look {number}",
        frontends=[msgspec.structs.replace(one, streams_by_group=streams)],
        instances=every[:256],
        instances_left_out=744,
        groups=grouped(every),
    )


async def test_a_thousand_instances_are_a_row_and_a_box_for_each_role(shown: pages.Shown) -> None:
    await shown.tell(fleet(), "▸ 750 × m, decode")
    rows = (
        "[...document.querySelectorAll('#instances tbody tr')]"
        ".map(e => [...e.cells].slice(0, 5).map(c => c.innerText).join('|'))"
    )
    groups = [
        "▸ 750 × m, decode|◐ 744 ready, 6 away|m|2250|",
        "▸ 250 × m, prefill|◐ 248 ready, 2 away|m|750|",
    ]
    found = await shown.evaluate(rows)
    assert [each.rpartition("|")[0] + "|" for each in found] == groups
    nodes = "[...document.querySelectorAll('#topology .node.worker .name')].map(e => e.textContent)"
    assert [each.partition(",")[0] for each in await shown.evaluate(nodes)] == [
        "750 × m",
        "250 × m",
    ]
    counts = "[...document.querySelectorAll('#topology .count')].map(e => e.textContent)"
    assert "700" in await shown.evaluate(counts)
    count = "document.querySelectorAll({}).length"
    # To the frontend, to the decode workers, and one for all blocks that move.
    assert await shown.evaluate(count.format("'#topology .edge'")) == 3
    assert await shown.evaluate(count.format("'#topology .edge.blocks.flowing'")) == 1
    note = await shown.evaluate("document.querySelector('#instances .note').innerText")
    assert note.startswith("744 are counted above and not listed")
    assert shown.chromium.errors == []


async def test_a_group_is_opened_by_keyboard_and_stays_open(shown: pages.Shown) -> None:
    """Those that are not well come first; the next look changes neither that nor the focus."""
    await shown.tell(fleet(), "▸ 750 × m, decode")
    group = "document.querySelector('#instances tbody button')"
    await shown.evaluate(f"{group}.focus()")
    await shown.run(partial(shown.chromium.press, " ", code=32))
    names = "[...document.querySelectorAll('#instances tbody td.name')].map(e => e.innerText)"
    for number in (1, 2):
        await shown.tell(fleet(number), "▾ 750 × m, decode")
        await shown.until(f"document.querySelector('#about').innerText.includes('look {number}')")
        opened = await shown.evaluate(names)
        assert len(opened) == 2 + 192
        assert opened[:4] == ["▾ 750 × m, decode", "w-125", "w-250", "w-1"]
        assert await shown.evaluate(f"{group}.getAttribute('aria-expanded')") == "true"
        assert await shown.evaluate(f"document.activeElement === {group}")
    await shown.evaluate(f"{group}.click()")
    assert len(await shown.evaluate(names)) == 2


async def test_it_is_usable_on_a_phone_and_in_the_dark(shown: pages.Shown) -> None:
    url = await shown.evaluate("location.href")
    await shown.open(url, width=360, scheme="dark")
    await shown.tell(snapshot(away="x" * 150))
    assert await shown.evaluate("document.documentElement.scrollWidth") == 360
    luminance = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    assert max(await shown.evaluate(luminance)) < 60
    wide = (
        "[...document.querySelectorAll('#topology svg, #happened svg')]"
        ".every(e => e.getBoundingClientRect().right <= 361)"
    )
    assert await shown.evaluate(wide)
    roomy = "[...document.querySelectorAll('#instances td.name')].every(e => e.offsetWidth >= 80)"
    assert await shown.evaluate(roomy), "a name such as decode-1 is broken inside otherwise"


async def test_everything_that_acts_or_pictures_has_a_name(shown: pages.Shown) -> None:
    await shown.tell(snapshot())
    unnamed = await shown.evaluate(
        "[...document.querySelectorAll('button, [tabindex=\"0\"], svg[role], g[role]')].filter(e =>"
        " !e.getAttribute('aria-label') && !e.getAttribute('aria-labelledby') && !e.textContent.trim())"
        ".map(e => e.outerHTML)"
    )
    assert unnamed == []


async def test_the_keyboard_opens_a_request_s_legs_and_keeps_its_place(shown: pages.Shown) -> None:
    await shown.tell(snapshot())
    await shown.evaluate("document.querySelector('#failed button').focus()")
    # A snapshot that comes meanwhile must not take the focus away.
    await shown.tell(snapshot(away="meanwhile"))
    await shown.until("!document.querySelector('#away').hidden")
    assert await shown.evaluate("document.activeElement.className") == "id"
    await shown.evaluate("document.activeElement.click()")
    await shown.until("document.querySelector('#legs').open")
    # This service keeps no traces, and the page says what it was told.
    await shown.until("document.querySelector('#legs .note').textContent.includes('404')")
    await shown.run(partial(shown.chromium.press, "Escape", code=27))
    await shown.until("!document.querySelector('#legs').open")


async def test_the_focus_stays_while_rows_come_and_go(shown: pages.Shown) -> None:
    told = snapshot()
    (request,) = told.under_way
    rows = [msgspec.structs.replace(request, id=f"{n:032x}") for n in range(4)]
    focused = "document.activeElement.dataset.id"

    async def show(*numbers: int) -> None:
        under_way = [rows[n] for n in numbers]
        shown.tabs.send(pages.event_of(msgspec.structs.replace(told, under_way=under_way)))
        ids = "[...document.querySelectorAll('#underway button')].map(e => e.dataset.id).join()"
        await shown.until(f"{ids} === {json.dumps(','.join(each.id for each in under_way))}")

    await shown.tell(told)
    await show(1, 2, 3)
    await shown.evaluate("document.querySelectorAll('#underway button')[1].focus()")
    await show(0, 2, 3)
    assert await shown.evaluate(focused) == rows[2].id
    # It is gone: the keyboard goes on from its table.
    await show(0, 3)
    inside = "document.activeElement === document.querySelector('#underway .scroll')"
    assert await shown.evaluate(inside)
    # The dialog of one that has ended meanwhile closes to its table, too.
    await shown.evaluate("document.querySelector('#underway button').focus()")
    await shown.evaluate("document.activeElement.click()")
    await shown.until("document.querySelector('#legs').open")
    await show(3)
    await shown.run(partial(shown.chromium.press, "Escape", code=27))
    await shown.until("!document.querySelector('#legs').open")
    await shown.until(inside)


async def test_figures_that_change_every_second_are_not_read_aloud(shown: pages.Shown) -> None:
    await shown.tell(snapshot())
    loud = (
        "[...document.querySelectorAll('output, [role=status], [aria-live]')]"
        ".filter(e => e.getAttribute('aria-live') !== 'off').map(e => e.id).sort().join()"
    )
    # Whether all is well, and whether the page is live: both change rarely.
    assert await shown.evaluate(loud) == "health,link"
    levels = "[...document.querySelectorAll('h1, h2, h3')].map(e => e.tagName).join()"
    assert (await shown.evaluate(levels)).startswith("H1,H2")
    assert "H3" not in await shown.evaluate(levels)


async def test_a_frontend_that_goes_is_told_and_found_again(chromium: Browser) -> None:
    tabs = Tabs()
    async with pages.serving(tabs) as service:
        found, port = pages.Shown(chromium, tabs), service.port
        await found.open(f"http://127.0.0.1:{port}/dashboard")
        await found.tell(snapshot("before"))
        await found.until("document.body.dataset.state === 'live'")
    await found.until("document.body.dataset.state === 'away'")
    assert await found.evaluate("document.querySelector('#link').innerText.includes('is away')")
    assert (
        await found.evaluate("document.querySelector('#instances tbody td').textContent")
        == "before"
    )
    again = Tabs()
    async with pages.serving(again, port=port):
        found.tabs = again
        await found.tell(snapshot("after"))
        await found.until("document.body.dataset.state === 'live'")
        await found.run(chromium.open, "about:blank")
