"""The figures in the live table of `trinamo up`: read once a second while a terminal shows them.

Memory and processor time come from `/proc`, requests from each process's own `/metrics`. A
process that does not answer keeps its row and loses its figures.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import trio

from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.view.facts import Rates
from trinamo.transports.assembly.run_file import is_worker_name
from trinamo.transports.openai.client import fetch

from ..children.shared_port import status_url_of
from .display import Display, ProcessRow

if TYPE_CHECKING:
    from trinamo.transports.servers import EmbeddedServer

    from ..children.child import Child
INTERVAL_S: Final = 1.0
ASK_TIMEOUT_S: Final = 0.8
_SAMPLE: Final = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{.*\})? (\S+)", re.MULTILINE)
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


async def watch_cluster(
    servers: Mapping[str, EmbeddedServer], children: Callable[[], list[Child]], display: Display
) -> None:
    """Show a cluster's processes, as they are each time, until cancelled."""
    rates = Rates()
    while True:
        display.show(await _rows(servers, children(), rates))
        await trio.sleep(INTERVAL_S)


async def _rows(
    servers: Mapping[str, EmbeddedServer], children: list[Child], rates: Rates
) -> list[ProcessRow]:
    samples: dict[str, dict[str, float]] = {}

    async def ask(child: Child) -> None:
        if url := status_url_of(child):
            with suppress(TrinamoError):
                _, body = await fetch(f"{url}/metrics", timeout_s=ASK_TIMEOUT_S)
                samples[child.name] = dict(sum_samples(body))

    async with open_nursery() as nursery:
        for child in children:
            nursery.start_soon(ask, child)
    rows = [
        _row(name, server.pid, "ready" if server.pid else "down", server.address, {}, rates)
        for name, server in servers.items()
    ]
    for child in children:
        where = str(child.facts.get("url") or child.facts.get("instance_id") or "")
        again = f" ({child.restarts} restarts)" if child.restarts else ""
        known = samples.get(child.name, {})
        state = "silent" if child.is_silent else child.state.value
        rows.append(_row(child.name, child.pid, state, where + again, known, rates))
    return rows


def _row(
    name: str, pid: int, state: str, note: str, samples: dict[str, float], rates: Rates
) -> ProcessRow:
    now_s = trio.current_time()
    usage = read_usage(pid) if pid else None
    role = "trinamo_worker_" if is_worker_name(name) else "trinamo_"
    tokens = (
        "trinamo_output_tokens_total"
        if role == "trinamo_"
        else "trinamo_engine_completion_tokens_total"
    )

    def rate(metric: str) -> float:
        # A counter has no sample before it has counted.
        return rates.update(f"{name} {metric}", samples.get(metric, 0.0), now_s)

    return ProcessRow(
        name=name,
        pid=pid,
        state=state,
        rss_bytes=None if usage is None else usage.rss_bytes,
        # Per process: a worker started again begins at zero.
        cpu_percent=None if usage is None else 100 * rates.update(f"cpu {pid}", usage.cpu_s, now_s),
        in_flight=samples.get(f"{role}requests_in_flight", 0.0) if samples else None,
        requests_per_s=rate(f"{role}requests_total") if samples else None,
        tokens_per_s=rate(tokens) if samples else None,
        note=note,
    )


@attrs.frozen
class ProcessUsage:
    """What a process uses: resident memory, and the processor time since it started."""

    rss_bytes: int
    cpu_s: float


def read_usage(pid: int) -> ProcessUsage | None:
    """The usage of a process; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace")
        pages = Path(f"/proc/{pid}/statm").read_text("ascii").split()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 13 or len(pages) < 2:
        return None
    return ProcessUsage(
        int(pages[1]) * _PAGE_BYTES, (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    )


def sum_samples(exposition: bytes) -> Mapping[str, float]:
    """Every metric of a text exposition, summed over its labels."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(exposition.decode("utf-8", "replace")):
        try:
            sums[name] = sums.get(name, 0.0) + float(value)
        except ValueError:
            continue
    return sums
