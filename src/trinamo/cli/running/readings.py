"""What a running process shows of itself: memory, processor time, and the numbers it counts.

Reads `/proc` and Prometheus' text format; nothing here waits or knows a cluster.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import attrs

_SAMPLE: Final = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{.*\})? (\S+)", re.MULTILINE)
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


@attrs.frozen
class Usage:
    """What a process uses: resident memory, and the processor time since it started."""

    rss_bytes: int
    cpu_s: float


def read_usage(pid: int) -> Usage | None:
    """The usage of a process; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace")
        pages = Path(f"/proc/{pid}/statm").read_text("ascii").split()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 13 or len(pages) < 2:
        return None
    return Usage(int(pages[1]) * _PAGE_BYTES, (int(fields[11]) + int(fields[12])) / _TICKS_PER_S)


def sum_samples(exposition: bytes) -> Mapping[str, float]:
    """Every metric of a text exposition, summed over its labels."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(exposition.decode("utf-8", "replace")):
        try:
            sums[name] = sums.get(name, 0.0) + float(value)
        except ValueError:
            continue
    return sums
