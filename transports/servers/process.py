"""One child process that cannot outlive its parent.

The child runs in a process group of its own, so that Ctrl-C at the terminal reaches the parent
first and the parent can drain before its servers go. It asks the kernel to be killed when its
parent dies, so even `kill -9` of the parent leaves nothing behind.

What the child is and when it is ready is not known here: see `embedded.py`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import trio

# Whether a server is ready: one question, one answer.
#
# The questions are the plainest each server offers: HTTP for etcd, the greeting for NATS. No client
# library is needed, and none of the planes.
PROBE_TIMEOUT_S: Final = 1.0
# etcd's metrics are some hundred kilobytes.
ANSWER_BYTES_MAX: Final = 1 << 20


async def etcd_is_ready(address: str) -> bool:
    """Whether the server serves, which in a cluster takes a leader."""
    # HTTP/1.0, so that no answer comes in chunks.
    return b'"true"' in await ask(address, b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")


async def nats_is_ready(address: str) -> bool:
    """Whether the server greets and has JetStream."""
    # The server speaks first; its INFO line says whether JetStream is up.
    return b'"jetstream":true' in await ask(address, b"")


async def ask(address: str, request: bytes) -> bytes:
    """What the server at `host:port` or `unix:path` answers within a second; or nothing."""
    answer = b""
    with trio.move_on_after(PROBE_TIMEOUT_S):
        try:
            if address.startswith("unix:"):
                stream = await trio.open_unix_socket(address.removeprefix("unix:"))
            else:
                host, _, port = address.rpartition(":")
                stream = await trio.open_tcp_stream(host, int(port))
            async with stream:
                if request:
                    await stream.send_all(request)
                while len(answer) < ANSWER_BYTES_MAX and (
                    part := await stream.receive_some(65_536)
                ):
                    answer += part
                    if not request:
                        break
        except (OSError, trio.BrokenResourceError):
            pass
    return answer


LOG_TAIL_BYTES: Final = 4000

# A launcher instead of a `preexec_fn`: code between fork and exec is unsafe in a process with
# threads, and gRPC brings threads. The parent may have died before the prctl call, hence the
# second look at it. The launcher execs, so the pid stays the same.
_LAUNCHER: Final = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
if hasattr(libc, "prctl"):
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""

# Both servers take options from the environment; the parent's settings are not meant for them.
_STRIPPED_PREFIXES: Final = ("ETCD_", "NATS_")


def spawn(
    command: Sequence[str],
    *,
    log_path: Path,
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command`, in `cwd` if one is given, with its output appended to `log_path`.

    Its environment is ours without what servers would take for settings, and `environ`.

    Call it from a thread that lives as long as the child should (the main thread, or the one that
    runs trio): the kernel ties the death signal to the spawning *thread*, so a worker thread that
    idles out would take the child with it. That is also why this is not `trio.run_process`, which
    spawns in a worker thread. It blocks for a fork and an exec, a few milliseconds.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_STRIPPED_PREFIXES)}
    with log_path.open("ab") as log:
        return subprocess.Popen(  # noqa: S603 -- the command is ours
            [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment | dict(environ or {}),
            process_group=0,
            cwd=cwd,
        )


def signal_group(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to the child's whole process group, if the child is still running."""
    # `poll` reaps, so the pid cannot belong to anyone else after this check.
    if child.poll() is not None:
        return
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        child.send_signal(number)


def wait_stopped(child: subprocess.Popen[bytes]) -> None:
    """Block until every thread of a child that was sent SIGSTOP has stopped, or it has exited."""
    if child.returncode is None:
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


async def wait_exit(child: subprocess.Popen[bytes]) -> int:
    """Wait until the child has exited, reap it and return its exit status. Cancellable."""
    if child.poll() is None:
        handle = os.pidfd_open(child.pid)
        try:
            await trio.lowlevel.wait_readable(handle)
        finally:
            os.close(handle)
    return child.wait()


async def terminate(child: subprocess.Popen[bytes], *, grace_s: float) -> int:
    """Ask the child to go, kill it after `grace_s`, reap it and return its exit status.

    When cancelled it kills at once; the child is dead and reaped on every way out.
    """
    try:
        # A stopped process does not see SIGTERM before it is continued.
        signal_group(child, signal.SIGTERM)
        signal_group(child, signal.SIGCONT)
        with trio.move_on_after(grace_s):
            await wait_exit(child)
    finally:
        signal_group(child, signal.SIGKILL)
        status = child.wait()  # A killed process is gone within a moment; this is no I/O.
    return status


def log_tail(log_path: Path, *, bytes_max: int = LOG_TAIL_BYTES) -> str:
    """The last `bytes_max` bytes of a child's output, for an error message."""
    try:
        with log_path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - bytes_max))
            return log.read().decode(errors="replace").strip()
    except FileNotFoundError:
        return ""


LOCK_NAME: Final = "lock"
# A directory younger than this may belong to someone who is about to lock it.
ABANDONED_AFTER_S: Final = 60.0
# Leaves room for the directory's own name and a socket in it.
PARENT_BYTES_MAX: Final = 70


def scratch_parent() -> Path:
    """Where these directories are made: the system's folder for temporary files, or `/tmp`.

    The path of a socket is at most 107 bytes long, and stands in lists of addresses.
    """
    place = Path(tempfile.gettempdir())
    is_fit = len(os.fsencode(place)) <= PARENT_BYTES_MAX and not set(", ") & set(str(place))
    return place if is_fit else Path("/tmp")  # noqa: S108 -- only for a directory of ours in it


@contextmanager
def scratch_directory(prefix: str, *, parent: Path | None = None) -> Iterator[Path]:
    """A new directory, for this user alone, whose name starts with `prefix`; deleted at exit.

    A server's data is large (etcd preallocates 64 MB), and an owner that dies by SIGKILL deletes
    nothing. So each directory is held by a file lock, which the kernel lets go when its owner dies;
    whoever makes a directory first deletes those of the same kind that nobody holds.
    """
    place = scratch_parent() if parent is None else parent
    _sweep(place, prefix)
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    try:
        with (directory / LOCK_NAME).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _sweep(place: Path, prefix: str) -> None:
    """Delete what dead owners left. What cannot be read or deleted is someone else's."""
    for lock_path in place.glob(f"{prefix}*/{LOCK_NAME}"):
        try:
            if time.time() - os.stat(lock_path).st_mtime < ABANDONED_AFTER_S:  # noqa: TID251, PTH116 -- compared with a file's time
                continue
            with lock_path.open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock_path.parent, ignore_errors=True)
        except OSError:
            continue
