"""Where figures were measured, and where the documentation shows them."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import peers


def machine() -> dict[str, str]:
    """Where this was measured, and with what."""
    cpus = Path("/proc/cpuinfo").read_text("utf-8")
    names = [line.split(":")[1].strip() for line in cpus.splitlines() if "model name" in line]
    return {
        "cpu": f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores",
        "kernel": platform.release(),
        "load average": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("trio", "grpcio", "msgspec")},
        **peers.versions(),
    }


def described(machine: dict[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in machine.items()) + "."


def write_results(path: Path, shown: str, *, by: str) -> None:
    """Put the table of the benchmark `by` between its two marks."""
    text = path.read_text("utf-8")
    head, begin, rest = text.partition(f"<!-- measured: written by {by} -->\n")
    _, end, tail = rest.partition("<!-- measured: end -->")
    assert end, f"{path} has no place for the table"
    path.write_text(f"{head}{begin}\n{shown}\n{end}{tail}", "utf-8")
