"""The page of a run in a real Chromium: it loads, filters, scrubs, prints, and runs no stranger's code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests import needs
from tests.sim.report.browser import CHROMIUM, Browser, browser
from trinamo.sim import Choices, LabelledChoices, Network, SeedChoices, Violation, World, page_of
from trinamo.sim.catalogue import FOLDER
from trinamo.sim.core.trace import Row
from trinamo.sim.explore import Played, played
from trinamo.sim.report import About, page, pair
from trinamo.sim.scenario.file import load_scenario
from trinamo.sim.scenario.run import run_scenario

pytestmark = [
    pytest.mark.check,
    needs.CHROMIUM.unless(CHROMIUM is not None),
]

HOSTILE = "</script><script>window.stolen = 1</script><img src=x onerror='window.stolen=1'>@@DATA@@"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def run_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scenario = load_scenario(FOLDER / "worker_dies.toml")
    # Which seeds show the mistake depends on every step of the code that runs.
    outcomes = (run_scenario(scenario, SeedChoices(n), bug="eof_is_complete") for n in range(1, 40))
    outcome = next(each for each in outcomes if each.violations)
    violation = outcome.violations[0]
    about = About(
        title="worker_dies", invariant=violation.invariant, text=violation.text, at_s=violation.at_s
    )
    path = tmp_path_factory.mktemp("page") / "run.html"
    path.write_text(page(outcome.world.trace.rows, about), "utf-8")
    return path


@pytest.fixture
def shown(chromium: Browser, run_page: Path) -> Browser:
    chromium._session = None
    chromium.errors.clear()
    chromium.open(run_page)
    return chromium


def position(shown: Browser) -> int:
    return int(shown.evaluate("Number(document.getElementById('time').value)"))


def test_it_loads_without_a_complaint_and_shows_the_failure(shown: Browser) -> None:
    assert shown.evaluate("document.getElementById('verdict').textContent").startswith("I2 broken")
    assert shown.evaluate("document.querySelectorAll('#diagram .message').length") > 50
    assert shown.evaluate("document.querySelectorAll('#diagram .band.down').length") == 1
    assert shown.evaluate("document.querySelectorAll('#states tr').length") >= 9
    assert shown.errors == []


def test_the_first_event_is_below_the_head_and_the_last_above_the_edge(shown: Browser) -> None:
    """The last one is what broke the rule; nothing is drawn over it, but where the reader stands."""
    dots = "[...document.querySelectorAll('#diagram .dot, #diagram .fault')]"
    inside = (
        "(() => { const box = document.getElementById('diagram').getBoundingClientRect();"
        f" const all = {dots}.map(e => e.getBoundingClientRect());"
        " return [Math.min(...all.map(e => e.top)) - box.top, box.bottom - Math.max(...all.map(e => e.bottom))]; })()"
    )
    shown.evaluate("document.getElementById('all').click()")
    shown.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    above, below = shown.evaluate(inside)
    assert above > 50
    assert below > 12
    order = (
        "document.querySelector('#diagram .violation').compareDocumentPosition("
        "document.querySelector('#diagram .dot')) & Node.DOCUMENT_POSITION_FOLLOWING"
    )
    assert shown.evaluate(order), "the line is below the events"


def test_it_is_dark_in_a_dark_browser(shown: Browser) -> None:
    def is_dark() -> bool:
        rgb = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
        return bool(max(shown.evaluate(rgb)) < 80)

    assert not is_dark()
    before = shown.evaluate("getComputedStyle(document.querySelector('#diagram .message')).stroke")
    media = [{"name": "prefers-color-scheme", "value": "dark"}]
    shown.call("Emulation.setEmulatedMedia", features=media)
    try:
        assert is_dark()
        ink = "getComputedStyle(document.querySelector('#diagram text.host')).fill.match(/\\d+/g).map(Number)"
        assert min(shown.evaluate(ink)) > 180
        line = "getComputedStyle(document.querySelector('#diagram .message')).stroke"
        assert shown.evaluate(line) != before
    finally:
        shown.call("Emulation.setEmulatedMedia", features=[])


def test_messages_slope_from_sending_to_landing(shown: Browser) -> None:
    paths = shown.evaluate(
        "[...document.querySelectorAll('#diagram .message')].map(p => p.getAttribute('d'))"
    )
    numbers = [tuple(map(float, p[1:].replace("L", " ").split())) for p in paths if "L" in p]
    assert all(y2 >= y1 for _, y1, _, y2 in numbers)
    assert sum(y2 > y1 for _, y1, _, y2 in numbers) > len(numbers) / 2


def test_the_arrow_keys_move_the_scrubber_one_event(shown: Browser) -> None:
    shown.evaluate("document.getElementById('time').focus()")
    start, moment = position(shown), shown.evaluate("document.getElementById('now').textContent")
    shown.press("ArrowRight", code=39)
    shown.press("ArrowRight", code=39)
    assert position(shown) == start + 2
    shown.press("ArrowLeft", code=37)
    assert position(shown) == start + 1
    assert shown.evaluate("document.getElementById('now').textContent") != moment
    shown.press("End", code=35)
    assert position(shown) == int(shown.evaluate("Number(document.getElementById('time').max)"))
    assert shown.errors == []


def test_the_picture_itself_takes_the_keys_and_zooms(shown: Browser) -> None:
    shown.evaluate("document.getElementById('diagram').focus()")
    label = "document.getElementById('diagram').getAttribute('aria-label')"
    before = shown.evaluate(label)
    shown.press("+", code=187)
    closer = shown.evaluate(label)
    shown.press("0", code=48)
    assert len({before, closer, shown.evaluate(label)}) == 3
    start = position(shown)
    shown.press("ArrowDown", code=40)
    assert position(shown) == start + 1


def test_a_click_moves_the_scrubber_and_the_states_follow(shown: Browser) -> None:
    box = shown.evaluate(
        "(b => [b.left, b.top, b.width, b.height])"
        "(document.getElementById('diagram').getBoundingClientRect())"
    )
    worker = "[...document.querySelectorAll('#states tr')].find(r => r.cells[0].textContent === 'worker1').cells[1].textContent"
    shown.click(box[0] + box[2] / 2, box[1] + 60)
    early = position(shown)
    assert shown.evaluate(worker) == "up, life 1"
    shown.click(box[0] + box[2] / 2, box[1] + box[3] - 30)
    assert position(shown) > early
    assert shown.evaluate(worker) == "killed"


def test_a_request_is_picked_and_the_others_are_dimmed(shown: Browser) -> None:
    assert shown.evaluate("document.querySelectorAll('#diagram .dim').length") == 0
    shown.evaluate(
        "(s => { s.value = '1'; s.dispatchEvent(new Event('change')); })(document.getElementById('request'))"
    )
    shown.settle()
    assert shown.evaluate("document.querySelectorAll('#diagram .dim').length") > 10
    own = "document.querySelectorAll('#diagram g > g:not(.dim) .message').length"
    assert (
        0
        < shown.evaluate(own)
        < shown.evaluate("document.querySelectorAll('#diagram .message').length")
    )
    pressed = "document.querySelectorAll('#legend [aria-pressed=true]').length"
    assert shown.evaluate(pressed) == 1
    start = position(shown)
    shown.evaluate("document.getElementById('diagram').focus()")
    shown.press("ArrowRight", code=39)
    assert position(shown) > start, "steps go over the events of the request"


def test_everything_that_acts_has_a_name_and_can_be_focused(shown: Browser) -> None:
    unnamed = shown.evaluate(
        "[...document.querySelectorAll('button, input, select, [tabindex]')].filter(e =>"
        " !(e.labels && e.labels.length) && !e.getAttribute('aria-label') && !e.textContent.trim())"
        ".map(e => e.outerHTML)"
    )
    assert unnamed == []


def test_it_prints_on_white_without_its_controls(shown: Browser) -> None:
    assert shown.pdf().startswith(b"%PDF")
    shown.call("Emulation.setEmulatedMedia", media="print")
    style = "getComputedStyle(document.getElementById('tools')).display"
    assert shown.evaluate(style) == "none"
    assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    shown.call("Emulation.setEmulatedMedia", media="")


def test_texts_of_a_hostile_trace_are_shown_and_never_run(
    chromium: Browser, tmp_path: Path
) -> None:
    rows = [
        Row(0.0, "driver", "boot", (("host", HOSTILE), ("generation", 1))),
        Row(0.1, f"{HOSTILE}.1", HOSTILE, (("request", HOSTILE), (HOSTILE, HOSTILE))),
        Row(0.2, "driver", "fault", (("do", HOSTILE), ("on", HOSTILE), ("to", ""))),
    ]
    about = About(title=HOSTILE, invariant=HOSTILE, text=f"{HOSTILE}\n{HOSTILE}", at_s=0.2)
    path = tmp_path / "hostile.html"
    path.write_text(page(rows, about), "utf-8")
    chromium._session = None
    chromium.errors.clear()
    chromium.open(path)
    assert chromium.evaluate("document.getElementById('title').textContent") == HOSTILE
    assert chromium.evaluate("typeof window.stolen") == "undefined"
    assert chromium.evaluate("document.querySelectorAll('img').length") == 0
    assert chromium.errors == []


def many_rows(count: int) -> list[Row]:
    """Three hosts that note what they write to disk, all the time, and now and then a vote."""
    rows = [Row(0.0, "driver", "boot", (("host", f"h{n}"), ("generation", 1))) for n in range(3)]
    rows.append(
        Row(0.0, "driver", "connect", (("connection", 1), ("source", "h0"), ("target", "h1")))
    )
    for n in range(count - len(rows)):
        time_s, host = n / 1000, f"h{n % 3}.1"
        if n % 100 == 50:
            rows.append(Row(time_s, host, "vote", (("request", f"r{n % 7}"), ("term", n))))
        elif n % 4 == 0:
            fields = (("connection", 1), ("source", "h0"), ("segment", "data"), ("number", n))
            more = (("size", 9), ("sent_s", time_s - 0.0005), ("label", f"append {n}"))
            rows.append(Row(time_s, "driver", "arrive", (*fields, *more)))
        else:
            rows.append(Row(time_s, host, "disk", (("bytes", n),)))
    return rows


@pytest.fixture
def crowded(chromium: Browser, tmp_path: Path) -> Browser:
    path = tmp_path / "crowded.html"
    path.write_text(page(many_rows(10_000), About(title="crowded")), "utf-8")
    chromium._session = None
    chromium.errors.clear()
    chromium.open(path)
    return chromium


NODES = "document.querySelectorAll('*').length"
TEXTS = "[...document.querySelectorAll('#diagram text')].map(t => t.textContent)"


def set_kind(shown: Browser, kind: str, *, on: bool) -> None:
    shown.evaluate(
        f"(b => {{ if (b.checked !== {str(on).lower()}) b.click(); }})"
        f"(document.querySelector('#kindlist input[value={kind}]'))"
    )
    shown.settle()


def listed(shown: Browser) -> set[str]:
    shown.evaluate("document.getElementById('listing').open = true")
    shown.settle()
    cells = "[...document.querySelectorAll('#list tr')].map(r => r.cells[2].textContent)"
    return set(shown.evaluate(cells))


def test_ten_thousand_rows_are_all_there_and_only_some_are_drawn(crowded: Browser) -> None:
    assert not crowded.evaluate("document.getElementById('omitted').textContent")
    crowded.evaluate("document.getElementById('all').click()")
    crowded.settle()
    assert crowded.evaluate(NODES) < 12_000
    assert listed(crowded)
    assert crowded.evaluate(NODES) < 15_000
    assert crowded.evaluate("document.querySelectorAll('#list tr').length") == 300
    assert "more; zoom in" in crowded.evaluate("document.getElementById('more').textContent")
    assert crowded.errors == []


def test_kinds_are_switched_off_and_what_they_stood_before_shows(crowded: Browser) -> None:
    assert {"disk", "data"} <= listed(crowded)
    for kind in ("disk", "data", "connect"):
        set_kind(crowded, kind, on=False)
    assert "of 5" in crowded.evaluate("document.getElementById('kindcount').textContent")
    crowded.evaluate("document.getElementById('all').click()")
    crowded.settle()
    assert listed(crowded) <= {"vote", "boot"}
    assert any(each.startswith("vote ") for each in crowded.evaluate(TEXTS))
    set_kind(crowded, "disk", on=True)
    assert "disk" in listed(crowded)
    crowded.evaluate("document.getElementById('nokinds').click()")
    crowded.settle()
    assert listed(crowded) == set()
    crowded.evaluate("document.getElementById('allkinds').click()")
    crowded.settle()
    assert {"disk", "data"} <= listed(crowded)
    assert crowded.errors == []


def test_a_rare_note_keeps_its_label_among_many_others_with_what_it_says(crowded: Browser) -> None:
    crowded.evaluate("document.getElementById('all').click()")
    crowded.settle()
    texts = crowded.evaluate(TEXTS)
    votes = [each for each in texts if each.startswith("vote ")]
    assert len(votes) > 20
    assert all("=" in each for each in votes)


def test_one_host_is_shown_alone_and_one_request_too(crowded: Browser) -> None:
    crowded.evaluate(
        "(s => { s.value = '2'; s.dispatchEvent(new Event('change')); })(document.getElementById('host'))"
    )
    crowded.settle()
    listed(crowded)
    hosts = (
        "[...new Set([...document.querySelectorAll('#list tr')].map(r => r.cells[1].textContent))]"
    )
    assert crowded.evaluate(hosts) == ["h2"]
    crowded.evaluate(
        "(s => { s.value = '1'; s.dispatchEvent(new Event('change')); })(document.getElementById('request'))"
    )
    crowded.settle()
    requests = (
        "[...new Set([...document.querySelectorAll('#list tr')].map(r => r.cells[3].textContent))]"
    )
    assert len(crowded.evaluate(requests)) == 1


def test_an_arrow_says_what_travels(crowded: Browser) -> None:
    texts = crowded.evaluate(TEXTS)
    assert any(text.startswith("append ") for text in texts)


@pytest.fixture(scope="module")
def small_run() -> Played:
    """Two hosts, a label that is hostile, one decision, a number that grows."""

    def play(choices: Choices) -> None:
        world = World(choices)
        network = Network(world)
        network.describe = lambda _: HOSTILE

        async def serve() -> None:
            async def answer(stream: trio.SocketStream) -> None:
                count = 0
                async for data in stream:
                    count += 1
                    world.note("asked", count=count)
                    await stream.send_all(data)

            await trio.serve_tcp(answer, 7000)

        async def ask() -> None:
            stream = await trio.open_tcp_stream("server", 7000)
            choices.below(3, HOSTILE)
            for _ in range(3):
                await stream.send_all(b"?")
                await stream.receive_some()

        async def main() -> None:
            world.boot("server", serve)
            await world.boot("client", ask).ended.wait()
            raise Violation(HOSTILE, HOSTILE)

        world.run(main)

    return played(play, LabelledChoices({HOSTILE: [2]}), to_draw=True)


@pytest.fixture
def small(chromium: Browser, small_run: Played, tmp_path: Path) -> Browser:
    chromium._session = None
    chromium.errors.clear()
    path = tmp_path / "small.html"
    path.write_text(page_of(HOSTILE, small_run), "utf-8")
    chromium.open(path)
    chromium.evaluate("document.getElementById('end').click()")
    chromium.evaluate(
        "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )
    return chromium


def texts(shown: Browser, selector: str) -> list[str]:
    found: list[str] = shown.evaluate(
        f"[...document.querySelectorAll('{selector}')].map(e => e.textContent)"
    )
    return found


def test_a_decision_is_listed_and_marked_and_a_click_goes_to_its_time(small: Browser) -> None:
    (listed,) = texts(small, "#decisions button")
    assert listed.startswith(f"{HOSTILE} = 2 of 3 on client.1, 0.00")
    assert small.evaluate("document.querySelectorAll('#diagram .decision').length") == 1
    end = position(small)
    small.evaluate("document.querySelector('#decisions button').click()")
    assert position(small) < end
    assert small.evaluate("typeof window.stolen") == "undefined"
    assert small.errors == []


def test_what_led_to_an_event_goes_from_host_to_host(small: Browser) -> None:
    led = texts(small, "#why button")
    hosts = [each.partition(":")[0] for each in led]
    assert {"client", "server"} <= set(hosts)
    assert small.evaluate("document.querySelectorAll('#diagram .led').length") == 1
    end = position(small)
    small.evaluate("[...document.querySelectorAll('#why button')].pop().click()")
    assert position(small) < end


def test_values_are_those_of_the_chosen_moment(small: Browser) -> None:
    assert texts(small, "#values td")[:3] == ["server", "asked count", "3"]
    small.evaluate("document.getElementById('time').focus()")
    small.press("Home", code=36)
    assert texts(small, "#values td")[2] == "–"


def test_two_runs_stand_side_by_side(chromium: Browser, small_run: Played, tmp_path: Path) -> None:
    chromium._session = None
    chromium.errors.clear()
    path = tmp_path / "pair.html"
    pages = (page_of("left", small_run), page_of("right", small_run, start_s=0.001))
    path.write_text(pair((HOSTILE, "right"), pages, HOSTILE), "utf-8")
    chromium.open(path)
    inner = "[...document.querySelectorAll('iframe')].map(f => f.contentDocument.querySelector('h1').textContent)"
    assert chromium.evaluate(inner) == ["left", "right"]
    boxes = chromium.evaluate(
        "[...document.querySelectorAll('iframe')].map(f => f.getBoundingClientRect().top)"
    )
    assert boxes[0] == boxes[1]
    assert texts(chromium, "pre") == [HOSTILE]
    assert chromium.evaluate("typeof window.stolen") == "undefined"
    assert chromium.errors == []
