"""Several machines on one: network namespaces on a bridge, each with an `/etc` and a home of its own.

What runs on one sees its own interfaces, name and hosts file, and reaches the others as over a cable.
All of it is made as root and taken away again; nothing outside is changed but for the bridge, which has
an address so that this process is one more machine.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final

import attrs
import trio

from tests.cluster.processes import until
from trinamo.transports.servers.process import log_tail, signal_group, spawn, terminate, wait_exit

START_S: Final = 300.0
END_S: Final = 300.0
COMMAND_S: Final = 300.0
ETH_P_ALL: Final = 3
"""Of Linux: frames of every protocol."""
FRAME_BYTES: Final = 1 << 17
"""More than a cable between namespaces passes at once."""
# As on Debian, where a machine's own name is an address of loopback.
HOSTS: Final = "127.0.0.1 localhost\n127.0.1.1 {name}\n"
_OWNED: Final = re.compile(r"(?:tri-|trb)(\d+)(?:-\w+)?")
"""Names of what a process of this number has made."""
_ENTER: Final = 'mount --bind "$1" /etc && hostname "$2" && cd "$3" && shift 3 && exec "$@"'


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=120)


@attrs.frozen
class Machine:
    """One network namespace, and a folder in which its commands run."""

    name: str
    namespace: str
    addresses: tuple[str, ...]
    home: Path
    environ: Mapping[str, str]
    """What its user has set."""

    @property
    def address(self) -> str:
        return self.addresses[0]

    @property
    def etc(self) -> Path:
        """What its commands see as `/etc`."""
        return self.home.with_name(f"{self.name}-etc")

    def command(self, words: Sequence[str]) -> list[str]:
        """How these words are run there; the process keeps its id."""
        program = shutil.which("ip")
        assert program is not None
        within = ("netns", "exec", self.namespace, "unshare", "--mount", "--uts")
        folders = (str(self.etc), self.name, str(self.home))
        return [program, *within, "sh", "-c", _ENTER, "sh", *folders, *words]

    @property
    def environment(self) -> dict[str, str]:
        """Only what a user of that machine would have."""
        kept = {key: os.environ[key] for key in ("PYTHONPATH", "LANG") if key in os.environ}
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        return {**kept, "PATH": path, "HOME": str(self.home), "COLUMNS": "200", **self.environ}

    async def run(self, line: str, *, codes: Sequence[int] = (0,)) -> str:
        """One line of a shell there, and what it printed; its status must be among `codes`."""
        with trio.fail_after(COMMAND_S):
            done = await trio.run_process(
                self.command(["sh", "-c", line]),
                env=self.environment,
                capture_stdout=True,
                capture_stderr=True,
                check=False,
            )
        said = done.stdout.decode() + done.stderr.decode()
        assert done.returncode in codes, f"{self.name}$ {line}\nstatus {done.returncode}\n{said}"
        return done.stdout.decode()

    def start(self, name: str, line: str) -> Running:
        """Start a line of a shell there and leave it running."""
        log = self.home / f"{name}.log"
        command = self.command(["sh", "-c", f"exec {line}"])
        environ = {**dict.fromkeys(_strange(), ""), **self.environment}
        return Running(f"{name} on {self.name}", log, spawn(command, log_path=log, environ=environ))


def _strange() -> Iterator[str]:
    """Variables of this process that a user of another machine would not have."""
    return (key for key in os.environ if key.startswith(("TRINAMO_", "XDG_")))


@attrs.define(eq=False)
class Running:
    """A process on a machine."""

    name: str
    log: Path
    child: subprocess.Popen[bytes]

    async def ready(self, word: bytes) -> str:
        """The line of its output that has `word`, as soon as there is one."""

        async def has_said() -> bool:
            assert self.child.poll() is None, f"{self.name} ended: {log_tail(self.log)}"
            return word in self.log.read_bytes()

        await until(has_said, f"{self.name} says {word!r}", timeout_s=START_S)
        lines = self.log.read_bytes().splitlines()
        return next(line.decode() for line in reversed(lines) if word in line)

    async def end(self) -> None:
        """SIGTERM, and the wait for a good end."""
        signal_group(self.child, signal.SIGTERM)
        with trio.fail_after(END_S):
            status = await wait_exit(self.child)
        assert status == 0, f"{self.name} ended with {status}: {log_tail(self.log)}"

    async def kill(self) -> None:
        signal_group(self.child, signal.SIGKILL)
        await wait_exit(self.child)

    async def close(self) -> None:
        await terminate(self.child, grace_s=5)


@contextmanager
def open_machines(
    folder: Path, wanted: Mapping[str, int], environ: Mapping[str, str]
) -> Iterator[dict[str, Machine]]:
    """Machines by name, each with so many addresses; all of them know one another's names.

    A machine's second, third, … address has no name: add one to `etc / "hosts"`. What a process has left that
    was killed in here is taken away first.
    """
    _sweep()
    number = os.getpid()
    net = f"10.{100 + number // 250 % 100}.{number % 250}"
    bridge = f"trb{number % 10_000_000}"
    with ExitStack() as stack:
        _made(stack, ("link", bridge, "type", "bridge"))
        ip("addr", "add", f"{net}.254/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        machines: dict[str, Machine] = {}
        for index, (name, count) in enumerate(wanted.items()):
            namespace, near = f"tri-{number}-{name}", f"trv{index}{number % 10_000_000}"
            addresses = tuple(f"{net}.{10 * index + each + 1}" for each in range(count))
            _made(stack, ("netns", namespace))
            there = ("peer", "name", "eth0", "netns", namespace)
            _made(stack, ("link", near, "type", "veth", *there))
            ip("link", "set", near, "master", bridge, "up")
            for each in addresses:
                ip("-n", namespace, "addr", "add", f"{each}/24", "dev", "eth0")
            for each in ("lo", "eth0"):
                ip("-n", namespace, "link", "set", each, "up")
            home = folder / name
            home.mkdir()
            machines[name] = Machine(name, namespace, addresses, home, environ)
        for machine in machines.values():
            shutil.copytree("/etc", machine.etc, symlinks=True, ignore=_only_plain)
            others = [each for each in machines.values() if each is not machine]
            known = "".join(f"{each.address} {each.name}\n" for each in others)
            (machine.etc / "hosts").write_text(HOSTS.format(name=machine.name) + known)
        yield machines


@asynccontextmanager
async def sniffed() -> AsyncIterator[list[bytes]]:
    """Every frame that passes while this is open: this process holds the cable that all machines are on."""
    frames: list[bytes] = []
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as ear:
        ear.setblocking(False)

        async def listen() -> None:
            while True:
                await trio.lowlevel.wait_readable(ear)
                with suppress(BlockingIOError):
                    while True:
                        frames.append(ear.recv(FRAME_BYTES))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            yield frames
            nursery.cancel_scope.cancel()


def _sweep() -> None:
    """Delete the namespaces and bridges of processes that are no more; the rest goes with them."""
    for kind, folder in (("netns", "/run/netns"), ("link", "/sys/class/net")):
        for name in (each.name for each in Path(folder).glob("tr[ib]*")):
            found = _OWNED.fullmatch(name)
            if found and not Path("/proc", found[1]).exists():
                subprocess.run(["ip", kind, "del", name], check=False, capture_output=True)


def _made(stack: ExitStack, words: Sequence[str]) -> None:
    """`ip KIND add NAME …`, and its deletion at the end."""
    kind, name, *more = words
    ip(kind, "add", name, *more)
    stack.callback(
        subprocess.run, ["ip", kind, "del", name], check=False, capture_output=True, timeout=20
    )


def _only_plain(folder: str, names: list[str]) -> list[str]:
    """What of `/etc` cannot be copied: sockets and the like."""
    return [
        each
        for each in names
        if not (path := Path(folder, each)).is_symlink() and not (path.is_file() or path.is_dir())
    ]
