"""What `trinamo doctor` says about moving KV blocks: devices, verbs, NIXL, Mooncake.

Findings of the kind that `ibstat` gives, read from `/sys`, and whether the libraries load. Loading
is tried in a child process: a library that ends its process must not end the doctor.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from ctypes.util import find_library
from pathlib import Path
from typing import Final

from trinamo.runtime.config import Config

__all__ = ["transfer_facts"]

_LOAD_TIMEOUT_S: Final = 10.0
_LOADS: Final = {
    "NIXL": (
        (
            "from trinamo.transports.nixl.agent import create_agent\n"
            "from trinamo.transports.nixl.options import NixlOptions, find_devices, ucx_environment\n"
            "options = NixlOptions()\n"
            "found = ucx_environment(options, find_devices(None))\n"
            "create_agent('doctor', found, progress_delay_s=0.01)\n"
            "print('UCX with', found['UCX_TLS'])\n"
        ),
        "pip install --no-deps nixl-cu12==1.5.1",
    ),
    "Mooncake": (
        (
            "from trinamo.transports.mooncake.engine import import_library\n"
            "import_library()\n"
            "print('loads; its ports are open to every interface')\n"
        ),
        (
            "apt-get install libibverbs1; "
            "pip install --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1"
        ),
    ),
}


def transfer_facts(
    config: Config, sys_class: Path = Path("/sys/class")
) -> Iterator[tuple[str, str, str, str]]:
    """`(what, verdict, text, remedy)`; takes a second or two."""
    plane = config.data_plane
    wants_rdma = plane.mooncake.enabled and plane.mooncake.protocol == "rdma"
    yield "RDMA devices", *_devices(sys_class / "infiniband", is_needed=wants_rdma)
    if find_library("ibverbs"):
        yield "verbs library", "good", "libibverbs is there", ""
    else:
        verdict = "missing" if plane.mooncake.enabled else "note"
        yield (
            "verbs library",
            verdict,
            "no libibverbs: Mooncake does not load without it",
            "apt-get install libibverbs1",
        )
    wanted = {"NIXL": plane.nixl.enabled, "Mooncake": plane.mooncake.enabled}
    for name, (program, remedy) in _LOADS.items():
        problem, text = _load(program)
        if problem:
            yield name, "missing" if wanted[name] else "note", problem, remedy
        else:
            yield name, "good", text, ""


def _devices(folder: Path, *, is_needed: bool) -> tuple[str, str, str]:
    ports = [
        f"{device.name}:{port.name} {_read(port / 'state')}, {_read(port / 'rate')}"
        for device in (sorted(folder.iterdir()) if folder.is_dir() else [])
        for port in sorted((device / "ports").glob("*"))
    ]
    if not ports:
        verdict = "missing" if is_needed else "note"
        return verdict, "none; KV blocks go over TCP, or by copy on one host", ""
    verdict = "good" if any("ACTIVE" in each for each in ports) else "warning"
    return verdict, "; ".join(ports), "" if verdict == "good" else "ibstat"


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return "unknown"


def _load(program: str) -> tuple[str, str]:
    """`(problem, what it said)` of a program in a process of its own."""
    try:
        done = subprocess.run(  # noqa: S603 -- our own programs, above
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=_LOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"did not load within {_LOAD_TIMEOUT_S:g} s", ""
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.strip()]
        return (words[-1] if words else f"ended with status {done.returncode}"), ""
    return "", done.stdout.strip()
