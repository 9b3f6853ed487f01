"""Real `trinamo` processes for the tests: every run has folders of its own, so that what it leaves
behind can be counted.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from trinamo import HttpService
from trinamo.runtime.errors import ModelNotFoundError
from trinamo.runtime.http.models.models import ModelKind
from trinamo.runtime.protocol.openai.generate import ModelCard

# The product's bounds are a few seconds, which a process of a loaded machine may miss.
PATIENT = {
    "TRINAMO_CONTROL_PLANE__ETCD__CONNECT_TIMEOUT_S": "60",
    "TRINAMO_CONTROL_PLANE__ETCD__REQUEST_TIMEOUT_S": "60",
    "TRINAMO_EVENT_PLANE__NATS__START_TIMEOUT_S": "60",
    "TRINAMO_EVENT_PLANE__NATS__CONNECT_TIMEOUT_S": "30",
}
# Safety nets: a loaded machine may take a minute for a start. `timeout` in pyproject.toml ends what hangs.
START_TIMEOUT_S = END_TIMEOUT_S = RUN_TIMEOUT_S = 300.0
COMMAND = [sys.executable, "-m", "trinamo.cli"]
Running: TypeAlias = "subprocess.Popen[bytes]"


@attrs.frozen
class Place:
    """Where commands run: their temporary and run folders are below `root`."""

    root: Path
    extra: Mapping[str, str] = attrs.field(factory=dict)
    is_patient: bool = True
    """Sets `PATIENT`; not where a build of before runs, which may not know all of them."""

    @property
    def environ(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TRINAMO_")}
        for name in ("tmp", "run"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        return {
            **inherited,
            "TMPDIR": str(self.root / "tmp"),
            "XDG_RUNTIME_DIR": str(self.root / "run"),
            **(PATIENT if self.is_patient else {}),
            **self.extra,
        }

    @property
    def leftovers(self) -> list[str]:
        """Files and folders that should not outlive a cluster."""
        found = [*(self.root / "tmp").iterdir(), *(self.root / "run").rglob("*.json")]
        return [str(path) for path in found]

    def start(self, *arguments: str) -> Running:
        """Start a command with its output in `output`, in a process group of its own."""
        with self.output_path.open("ab") as output:
            return subprocess.Popen(
                [*COMMAND, *arguments],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
                cwd=self.root,
            )

    @property
    def output_path(self) -> Path:
        return self.root / "output"

    @property
    def output(self) -> str:
        return self.output_path.read_text("utf-8", "replace")

    @property
    def ready_url(self) -> str:
        """Where a frontend that was started by itself says that it listens."""
        (found,) = re.findall(r'frontend is ready: url ([^,\s"]+)', self.output)
        return str(found)

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [*COMMAND, *arguments],
            env=self.environ,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
            cwd=self.root,
        )


@attrs.frozen
class RunningCluster:
    """A `trinamo up` that is ready."""

    place: Place
    process: Running

    @property
    def url(self) -> str:
        words = self.place.output.split("The cluster is ready: ")[1]
        return words.split()[0].removesuffix("/v1")

    @property
    def children(self) -> dict[int, str]:
        return children_of(self.process.pid)

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(END_TIMEOUT_S)


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {timeout_s:g} s"
        time.sleep(0.02)


@contextmanager
def cluster(place: Place, *arguments: str) -> Iterator[RunningCluster]:
    """`trinamo up --port 0 …`, ready; killed at the end if the test has not ended it."""
    process = place.start("up", "--port", "0", *arguments)
    try:
        wait_for(
            lambda: "The cluster is ready" in place.output or process.poll() is not None,
            START_TIMEOUT_S,
            "the cluster's start",
        )
        assert process.poll() is None, place.output
        yield RunningCluster(place, process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def terminal(
    place: Place, *arguments: str
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], str], Callable[[bytes], None]]]:
    """A command on a terminal of its own: the process, what it has shown, and how to type."""
    ours, theirs = pty.openpty()
    # Wide enough for the longest socket of an etcd, or a table would break its words.
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    os.set_blocking(ours, False)
    process = subprocess.Popen(
        [sys.executable, "-c", AS_SESSION_LEADER, *COMMAND, *arguments],
        env={**place.environ, "TERM": "xterm-256color"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=place.root,
        start_new_session=True,
    )
    os.close(theirs)
    seen = bytearray()

    def shown() -> str:
        with suppress(OSError):
            while data := os.read(ours, 65_536):
                seen.extend(data)
        return seen.decode("utf-8", "replace")

    try:
        yield process, shown, lambda data: (os.write(ours, data), None)[1]
        shown()
    finally:
        process.kill()
        process.wait()
        os.close(ours)


# Ctrl-C at a terminal reaches only those whose controlling terminal it is.
AS_SESSION_LEADER = (
    "import fcntl, os, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)


def children_of(pid: int) -> dict[int, str]:
    """The child processes of a process: pid to command line."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        parent = int(stat.rpartition(")")[2].split()[1])
        if parent == pid:
            found[int(folder.name)] = command
    return found


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def rss_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def unknown_model(name: str, served: str) -> str:
    """What a frontend that serves one model says of another one."""
    models = HttpService.builder().build().model_manager()
    no_engine: Any = None
    models.add_model(ModelCard(name=served, endpoint="a/b/c"), no_engine)
    try:
        models.find(name, ModelKind.CHAT)
    except ModelNotFoundError as error:
        return error.message
    raise AssertionError(f"{name} is served")
