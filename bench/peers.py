"""The peers that are not trinamo's to install: an environment of their own, made on demand.

    python bench/peers.py install     # once; some 150 MB under ~/.cache/trinamo-bench
    python bench/peers.py             # what is there

Without them the benchmarks measure trinamo, grpc.aio and the bare loops, and say what is missing.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

from load.load import cache_directory

ALONE = (
    "ai-dynamo-runtime==1.6.1",
    "ai-dynamo==1.6.1",
    "sglang-router==0.3.2",
    "vllm-router==0.1.17",
)
"""Without what they ask for: that is torch, transformers and kubernetes, which their frontends and
routers do not import."""
PURE = (
    "packaging",
    "msgspec",
    "prometheus-client",
    "pyzmq",
    "aiohttp",
    "certifi",
    "zstandard",
    "redis<9",
    "pyyaml",
    "pydantic<=2.13.5",
    "numpy",
    "orjson",
    "requests",
    "setproctitle",
    "fastapi",
    "uvicorn",
    "httptools",
    "uvloop",
)


def python() -> Path:
    """The interpreter of the peers."""
    return cache_directory() / "peers" / "bin" / "python"


@cache
def versions() -> dict[str, str]:
    """What is installed of the peers, by name; empty if nothing is."""
    if not python().exists():
        return {}
    asked = subprocess.run(
        [python(), "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"],
        check=True,
        capture_output=True,
        text=True,
    )
    found = dict(line.split("==", 1) for line in asked.stdout.splitlines() if "==" in line)
    return {name: found[name] for name in (*names(ALONE), "uvicorn", "uvloop") if name in found}


def names(requirements: tuple[str, ...]) -> list[str]:
    return [each.partition("==")[0] for each in requirements]


def has(name: str) -> bool:
    """Whether this peer is installed."""
    return name in versions()


def install() -> None:
    directory = cache_directory() / "peers"
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    pip = [python(), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", *ALONE], check=True)
    subprocess.run([*pip, *PURE], check=True)


def main() -> None:
    if sys.argv[1:] == ["install"]:
        install()
    elif sys.argv[1:]:
        raise SystemExit(__doc__)
    for name, version in versions().items():
        print(name, version)


if __name__ == "__main__":
    main()
