"""The file itself: events as JSON, the style and the script in place, the policy that seals it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from ..core.trace import Row
from .causes import Lineage, Step
from .events import ITEMS_MAX, Events, events_of

BYTES_MAX = 2_000_000
HOSTS_MAX = 200
REQUESTS_MAX = 2000
FOLDER = Path(__file__).parent
TEXT_MAX = 20_000
DECISIONS_MAX = 60
"""Of a run with more none is shown: it is to be shrunk first."""


@attrs.frozen
class Decision:
    """One that was not the default answer: when, on which host, about which link, `value` out of `n`."""

    time_s: float
    host: str
    about: str
    label: str
    n: int
    value: int


@attrs.frozen(kw_only=True)
class About:
    """What the page says of the run beside its picture."""

    title: str
    invariant: str = ""
    """The rule that was broken; empty if none was."""
    text: str = ""
    at_s: float = 0.0
    end_s: float = 0.0
    facts: tuple[tuple[str, str], ...] = ()
    decisions: tuple[Decision, ...] = ()
    start_s: float | None = None
    """Where the page begins; if None, at the first fault."""


def page(
    rows: Sequence[Row], about: About, *, steps: Sequence[Step] = (), bytes_max: int = BYTES_MAX
) -> str:
    """The page for a trace, and for its `steps` if they are known, at most `bytes_max` bytes as UTF-8.

    If not all fits, the latest events are shown and the page says what is missing. Raises
    `ValueError` if not even an empty picture fits.
    """
    items_max = ITEMS_MAX
    while True:
        style, script = _asset("diagram.css"), _asset("diagram.js")
        policy = (
            f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}';"
            " img-src data:; base-uri 'none'; form-action 'none'"
        )
        # Without lone surrogates, which UTF-8 cannot hold.
        parts = {
            "POLICY": html.escape(policy, quote=True),
            "TITLE": html.escape(about.title.encode("utf-8", "replace").decode()[:200]),
            "STYLE": style,
            "DATA": _embedded(
                _data(
                    events_of(rows, end_s=about.end_s, items_max=items_max),
                    about,
                    Lineage(steps, rows),
                )
            ),
            "SCRIPT": script,
        }
        text = _filled("diagram.html", parts)
        if len(text.encode()) <= bytes_max:
            return text
        if items_max < 10:
            raise ValueError(f"no picture of this run fits in {bytes_max} bytes")
        items_max //= 2


def _asset(name: str) -> str:
    return (FOLDER / name).read_text("utf-8")


def _filled(name: str, parts: dict[str, str]) -> str:
    # Split before anything is put in: data that holds a marker stays data.
    pieces = _asset(name).split("@@")
    return "".join(parts[p] if i % 2 else p for i, p in enumerate(pieces))


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _embedded(data: Any) -> str:
    """JSON that ends no script element and opens no comment, whatever texts it holds."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _data(events: Events, about: About, lineage: Lineage) -> dict[str, Any]:
    hosts = {name: index for index, name in enumerate(events.hosts[:HOSTS_MAX])}
    requests = {name: index for index, name in enumerate(events.requests[:REQUESTS_MAX])}
    kinds: dict[str, int] = {}

    def kind(name: str) -> int:
        return kinds.setdefault(name[:100], len(kinds))

    def time(seconds: float) -> float:
        return round(seconds, 7)

    messages = [
        [
            time(m.sent_s), None if m.land_s is None else time(m.land_s), hosts[m.source],
            hosts[m.target], kind(m.kind), m.text, requests.get(m.request, -1), m.fate, m.label,
            lineage.of_sending(m.source, m.sent_s),
        ]
        for m in events.messages
        if m.source in hosts and m.target in hosts
    ]  # fmt: skip
    notes = [
        [
            time(n.time_s), hosts[n.host], kind(n.kind), n.text, requests.get(n.request, -1),
            n.count, time(n.last_s), lineage.of_row(n.row),
        ]
        for n in events.notes
        if n.host in hosts
    ]  # fmt: skip
    omitted = [events.omitted] if events.omitted else []
    if len(events.hosts) > HOSTS_MAX:
        omitted.append(f"Only the first {HOSTS_MAX} of {len(events.hosts)} hosts are shown.")
    if len(events.requests) > REQUESTS_MAX:
        omitted.append(f"Only {REQUESTS_MAX} of {len(events.requests)} requests have a name here.")
    return {
        "title": about.title[:200],
        "invariant": about.invariant[:200],
        "text": about.text[:TEXT_MAX],
        "at": time(about.at_s),
        "end": time(events.end_s),
        "facts": [[name[:100], value[:500]] for name, value in about.facts],
        "steps": events.step_count,
        "omitted": " ".join(omitted),
        "hosts": list(hosts),
        "requests": list(requests),
        "kinds": list(kinds),
        "lives": [
            [hosts[host], time(start), time(end), generation, how]
            for host, start, end, generation, how in events.lives
            if host in hosts
        ],
        "bands": [
            [hosts[b.host], time(b.start_s), time(b.end_s), b.kind, b.text]
            for b in events.bands
            if b.host in hosts
        ],
        "messages": messages,
        "notes": notes,
        "lineage": lineage.as_data(hosts),
        "start": about.start_s,
        "decisions": [
            [time(d.time_s), d.host[:100], d.label[:200], d.value, d.n, _struck(d, events)]
            for d in (about.decisions if len(about.decisions) <= DECISIONS_MAX else ())
        ],
        "values": [
            [hosts[host], name[:100], [[time(time_s), value] for time_s, value in series]]
            for (host, name), series in events.values.items()
            if host in hosts
        ],
    }


def _struck(decision: Decision, events: Events) -> str:
    """The link, and the messages sent over it then, that a decision was about; or nothing."""
    sent = [
        m.label or m.text
        for m in events.messages
        if f"{m.source} → {m.target}" == decision.about and abs(m.sent_s - decision.time_s) < 1e-8
    ]
    return ": ".join(each for each in (decision.about, ", ".join(dict.fromkeys(sent))) if each)[
        :300
    ]


def pair(titles: tuple[str, str], pages: tuple[str, str], said: str) -> str:
    """Two pages side by side in one file, under a title and what is said of them."""
    style = _asset("pair.css")
    policy = f"default-src 'none'; script-src '{_hash(_asset('diagram.js'))}'"
    policy += f"; style-src '{_hash(style)}' '{_hash(_asset('diagram.css'))}'; img-src data:"
    frames = "".join(
        f'<iframe title="{html.escape(title, quote=True)}" srcdoc="{html.escape(text, quote=True)}"></iframe>'
        for title, text in zip(titles, pages, strict=True)
    )
    parts = {
        "POLICY": html.escape(policy, quote=True),
        "TITLE": " / ".join(html.escape(title[:100]) for title in titles),
        "STYLE": style,
        "SAID": html.escape(said[:TEXT_MAX]),
        "FRAMES": frames,
    }
    return _filled("pair.html", parts)
