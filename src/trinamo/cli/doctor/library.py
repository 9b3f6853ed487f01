"""Whether NIXL and Mooncake load, what UCX can use, and whether the kernel copies between processes.

Each is tried in a process of its own, which may crash, hang, or be refused.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from typing import Final

import attrs

_TIMEOUT_S: Final = 10.0
_OUTPUT_CHARS_MAX: Final = 1 << 20
_NO_LIBRARY: Final = re.compile(r"(lib[\w+.-]+?\.so[\w.]*): cannot open shared object file")
_DEBIAN: Final = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}


@attrs.frozen
class Loaded:
    """What came of loading a library; a `problem`, or a `text`."""

    problem: str = ""
    text: str = ""
    transports: tuple[str, ...] = ()
    """Of UCX, each with its devices."""


@attrs.frozen
class Library:
    """How one is loaded, and how it is installed."""

    program: str
    """Prints what it has to say; ends in an exception otherwise."""
    install: str
    mends_crash: str = ""
    """The command against what is known to end its process by SIGSEGV."""

    def remedy(self, problem: str) -> str:
        """The command that mends `problem`."""
        if self.mends_crash and signal.SIGSEGV.name in problem:
            return self.mends_crash
        missing = _NO_LIBRARY.search(problem)
        if missing is not None and missing[1] in _DEBIAN:
            # With what it recommends, libibverbs1 brings the package that makes NIXL crash.
            return f"apt-get install --no-install-recommends {_DEBIAN[missing[1]]}"
        if missing is not None:
            return f"install the package that contains {missing[1]}"
        return self.install


LIBRARIES: Final = {
    "NIXL": Library(
        # UCX lists its transports only in its debug output.
        program=(
            "import os\n"
            "os.environ.update(NIXL_LOG_LEVEL='FATAL', UCX_LOG_LEVEL='debug')\n"
            "from importlib.metadata import version\n"
            "from trinamo.transports.nixl.agent import create_agent\n"
            "from trinamo.transports.nixl.options import NixlOptions, find_devices, ucx_environment\n"
            "found = ucx_environment(NixlOptions(), find_devices(None)) | {'UCX_TLS': 'all'}\n"
            "create_agent('doctor', found, progress_delay_s=0.01)\n"
            "print('nixl-cu12', version('nixl-cu12'), 'loads, and its agent starts')\n"
        ),
        install="pip install --no-deps nixl-cu12==1.5.1",
        mends_crash="apt-get remove ibverbs-providers, which a host without RDMA does not need",
    ),
    "Mooncake": Library(
        program=(
            "from importlib.metadata import version\n"
            "from trinamo.transports.mooncake.engine import import_library\n"
            "import_library()\n"
            "print('mooncake', version('mooncake-transfer-engine-non-cuda'),"
            " 'loads; its ports will be open to every interface')\n"
        ),
        install=(
            "apt-get install --no-install-recommends libibverbs1; "
            "pip install --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1"
        ),
    ),
}


def load(name: str) -> Loaded:
    """Load one of `LIBRARIES` in a process of its own; takes a second, at most ten."""
    try:
        done = subprocess.run(  # noqa: S603 -- our own programs, above
            [sys.executable, "-c", LIBRARIES[name].program],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Loaded(problem=f"did not load within {_TIMEOUT_S:g} s")
    output = done.stdout[-_OUTPUT_CHARS_MAX:].splitlines()
    transports = parse_transports(output)
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.strip()]
        code = done.returncode
        how = f"with status {code}" if code > 0 else f"by {signal.Signals(-code).name}"
        problem = f"its process ended {how}"
        if words and code > 0:
            # The message of a traceback's last line, without the name of the class.
            kind, _, text = words[-1].partition(": ")
            problem = text if text and kind.replace(".", "").isidentifier() else words[-1]
        return Loaded(problem=problem, transports=transports)
    return Loaded(text=output[-1] if output else "loads", transports=transports)


def parse_transports(lines: Iterable[str]) -> tuple[str, ...]:
    """The rows of UCX's table of transports: `tcp (eth0, lo)`, `cma`; empty if there is none.

    A row is `| network | tcp | + tcp | - eth0 + lo |`, a plus or minus for what is enabled.
    """
    found: list[str] = []
    for line in lines:
        columns = [each.strip() for each in line.split("|")[1:-1]]
        if len(columns) != 4 or columns[2][:2] not in ("+ ", "- "):
            continue
        devices = [each for each in columns[3].split() if each not in ("+", "-", "memory")]
        name = columns[2][2:]
        found.append(f"{name} ({', '.join(devices)})" if devices else name)
    return tuple(found)
