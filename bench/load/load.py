"""The HTTP load generator: compiled on demand, run in a process of its own, read line by line."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

SOURCE = Path(__file__).with_name("load.c")
TEXT = "~tok "
"""One token: `load.c` finds it in a body by its first four characters."""
DESCRIPTORS = 65_536


def cache_directory() -> Path:
    """Where what is built or installed for the benchmarks stays, outside the environment."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "trinamo-bench"


def load_program() -> Path:
    """The compiled generator, made anew if its source has changed."""
    name = f"load-{sha256(SOURCE.read_bytes()).hexdigest()[:12]}"
    program = cache_directory() / name
    if not program.exists():
        compiler = shutil.which("cc")
        if compiler is None:
            raise SystemExit("the HTTP benchmarks need a C compiler called cc: their load is C")
        program.parent.mkdir(parents=True, exist_ok=True)
        fresh = program.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, "-O2", "-o", str(fresh), str(SOURCE)], check=True)
        fresh.rename(program)
    return program


def raise_descriptors() -> None:
    """As many sockets as this user may have; children inherit it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if most == resource.RLIM_INFINITY else min(DESCRIPTORS, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def body(
    model: str, *, tokens: int, pause_s: float = 0, by_itself: bool = False, stream: bool = True
) -> bytes:
    """A chat request; how its tokens are made travels in fields that every server leaves alone."""
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": "Say it again, as often as you are asked to."}],
        "max_tokens": tokens,
        "temperature": pause_s,
        "seed": int(by_itself),
        "stream": stream,
    }
    return json.dumps(asked).encode()


def run_load(
    port: int,
    request: bytes,
    *,
    connections: int,
    each: int = 1,
    spread_s: float = 0,
    path: str = "/v1/chat/completions",
    marked: Callable[[int, int], object] = lambda number, tokens: None,
) -> dict[str, float]:
    """Send `each` requests over every connection, one after the other, and say what came back.

    `marked` hears the tokens so far when every stream has its first one (1), and when the first
    stream ends (2): between the two nothing but tokens is on the way.
    """
    with tempfile.TemporaryDirectory(prefix="trinamo-bench-") as directory:
        body_file, head_file = Path(directory) / "body", Path(directory) / "head"
        body_file.write_bytes(request)
        head_file.write_text(
            f"POST {path} HTTP/1.1\r\nHost: localhost:{port}\r\nAccept: */*\r\n"
            "User-Agent: load\r\nContent-Type: application/json\r\n",
            "ascii",
            newline="",
        )
        command = [load_program(), port, connections, each, body_file, head_file, spread_s * 1e3]
        with subprocess.Popen([str(each) for each in command], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            found: dict[str, float] = {}
            for line in process.stdout:
                found = json.loads(line)
                if "mark" in found:
                    marked(int(found["mark"]), int(found["tokens"]))
    if "wall_s" not in found:
        raise SystemExit(f"the load generator ended with status {process.returncode}")
    return found
