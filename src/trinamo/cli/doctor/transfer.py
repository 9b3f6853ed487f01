"""What `trinamo doctor` says about moving KV blocks: devices, limits, libraries, transports.

What `ibstat` would tell is read from `/sys`; what `ib_write_bw` and `ib_write_lat` would is the
business of `trinamo bench transfer`, on one host, and of the tool itself between two. Libraries are
loaded in a child process: one that ends its process must not end the doctor.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from ctypes.util import find_library
from pathlib import Path
from typing import Final, Literal

import attrs

from trinamo.runtime.config.config import Config
from trinamo.runtime.config.planes import MooncakeConfig
from trinamo.runtime.errors import ConfigError

from .finding import Finding, FindingVerdict
from .library import LIBRARIES, Loaded, load

_GOOD, _NOTE, _WARNING, _MISSING = FindingVerdict
_TOOLS: Final = {
    "ibstat": "infiniband-diags",
    "ib_write_bw": "perftest",
    "ib_write_lat": "perftest",
}
"""Debian's packages of them."""


@attrs.frozen
class MachinePaths:
    """Where to look; tests look elsewhere."""

    sys_class: Path = Path("/sys/class")
    dev: Path = Path("/dev")
    find_library: Callable[[str], str | None] = find_library
    find_tool: Callable[[str], str | None] = shutil.which
    load: Callable[[str], Loaded] = load
    environ: Mapping[str, str] = attrs.field(factory=lambda: os.environ)
    locked_bytes_max: int = attrs.field(
        factory=lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    )


def transfer_findings(config: Config, machine: MachinePaths | None = None) -> Iterator[Finding]:
    """One after the other; two libraries are loaded, which takes a second or two."""
    machine = MachinePaths() if machine is None else machine
    plane = config.data_plane
    wants_rdma = "mooncake" in plane.backends
    wanted = {
        "NIXL": "nixl" in plane.backends,
        "Mooncake": wants_rdma or "mooncake_tcp" in plane.backends,
    }
    adapters = machine.sys_class / "infiniband"
    has_rdma = adapters.is_dir() and any(adapters.iterdir())
    yield from _devices(adapters, is_needed=wants_rdma)
    if wanted["NIXL"]:
        yield _nixl_device(plane.nixl.rdma_interface, machine)
    if wanted["Mooncake"]:
        yield _mooncake_path(plane.mooncake, adapters, machine.environ)
    if has_rdma:
        yield _access(machine.dev / "infiniband", is_needed=wants_rdma)
        yield from _tools(machine)
    yield _verbs(machine, is_needed=wanted["Mooncake"])
    yield _locked_memory(machine.locked_bytes_max, has_rdma=has_rdma)
    yield _checksum()
    for name, library in LIBRARIES.items():
        loaded = machine.load(name)
        if loaded.problem:
            verdict = _MISSING if wanted[name] else _NOTE
            text = f"{loaded.problem}; KV blocks go over TCP"
            yield Finding(name, verdict, text, library.remedy(loaded.problem))
        else:
            yield Finding(name, _GOOD, loaded.text)
        if name == "NIXL" and not loaded.problem:
            yield _transports(loaded.transports, has_rdma=has_rdma)


# --- devices -------------------------------------------------------------------------------------


def _devices(folder: Path, *, is_needed: bool) -> Iterator[Finding]:
    devices = sorted(folder.iterdir()) if folder.is_dir() else []
    if not devices:
        yield Finding(
            "RDMA devices",
            _MISSING if is_needed else _NOTE,
            "none; KV blocks go over TCP",
            "load the adapter's driver (modprobe mlx5_ib), or set data_plane.mooncake.protocol=tcp"
            if is_needed
            else "",
        )
    for device in devices:
        ports = sorted((device / "ports").glob("*"))
        if not ports:
            yield Finding(f"RDMA {device.name}", _WARNING, "it has no ports", "ibstat")
        for port in ports:
            yield _port(device, port)


def _port(device: Path, port: Path) -> Finding:
    """What `ibstat` says of one port."""
    state, physical = _word(port / "state"), _word(port / "phys_state")
    kind = _read(port / "link_layer")
    text = (
        f"{state}, link {physical}, {_read(port / 'rate')}, {kind}; "
        f"{_read(device / 'node_type').partition(' ')[2] or 'device'}, "
        f"firmware {_read(device / 'fw_ver')}, GUID {_read(device / 'node_guid')}"
    )
    if kind == "InfiniBand":
        text += f", LID {_read(port / 'lid')}, SM LID {_read(port / 'sm_lid')}"
    what = f"RDMA {device.name}:{port.name}"
    if state == "ACTIVE":
        return Finding(what, _GOOD, text)
    if physical != "LinkUp":
        remedy = "check the cable and the switch's port; with Ethernet: ip link set DEVICE up"
    elif kind == "InfiniBand":
        remedy = "start a subnet manager in the fabric (opensm)"
    else:
        remedy = "ip link set DEVICE up, and give it an address"
    return Finding(what, _WARNING, text, remedy)


def _nixl_device(name: str | None, machine: MachinePaths) -> Finding:
    """Whether the device of the configuration is there."""
    from trinamo.transports.nixl.options import find_devices

    try:
        found = find_devices(name, machine.sys_class)
    except ConfigError as error:
        return Finding("NIXL's device", _MISSING, error.message)
    what = ", ".join(found.names) + (" (RDMA)" if found.has_rdma else "")
    if name is None:
        return Finding(
            "NIXL's device",
            _WARNING,
            f"{what}: it reaches peers on this host only",
            "set data_plane.nixl.rdma_interface",
        )
    return Finding("NIXL's device", _GOOD, what)


def _mooncake_path(section: MooncakeConfig, adapters: Path, environ: Mapping[str, str]) -> Finding:
    """What its engine would run over, which it does not say itself."""
    from trinamo.transports.mooncake.engine import MooncakeOptions, choose_path

    what = "Mooncake's path"
    protocol: Literal["rdma", "tcp"] = "rdma" if section.protocol == "rdma" else "tcp"
    try:
        options = MooncakeOptions(protocol=protocol, device=section.device)
        path = choose_path(options, environ, adapters)
    except ConfigError as error:
        return Finding(what, _MISSING, error.message)
    if path != section.protocol:
        text = f"MC_FORCE_TCP is set, so {path}, though {section.protocol} is configured"
        return Finding(what, _WARNING, text, "unset MC_FORCE_TCP")
    return Finding(what, _GOOD, path)


def _access(folder: Path, *, is_needed: bool) -> Finding:
    """Whether this user may open the devices."""
    files = sorted(folder.glob("uverbs*"))
    bad = _MISSING if is_needed else _WARNING
    if not files:
        remedy = "modprobe ib_uverbs; for a container: --device=/dev/infiniband"
        return Finding("RDMA access", bad, f"no uverbs files in {folder}", remedy)
    closed = [each.name for each in files if not os.access(each, os.R_OK | os.W_OK)]
    if closed:
        text = f"{', '.join(closed)} cannot be opened by this user"
        return Finding("RDMA access", bad, text, "add the user to the group rdma")
    return Finding("RDMA access", _GOOD, ", ".join(each.name for each in files))


def _tools(machine: MachinePaths) -> Iterator[Finding]:
    missing = [name for name in _TOOLS if machine.find_tool(name) is None]
    if missing:
        packages = " ".join(dict.fromkeys(_TOOLS[name] for name in missing))
        text = f"without {', '.join(missing)}, which check a fabric between two hosts"
        yield Finding("RDMA tools", _NOTE, text, f"apt-get install {packages}")
    else:
        text = (
            "run `ib_write_bw` on one host, `ib_write_bw HOST` on another; `ib_write_lat` likewise"
        )
        yield Finding("RDMA tools", _GOOD, text)


def _verbs(machine: MachinePaths, *, is_needed: bool) -> Finding:
    there = [name for name in ("ibverbs", "rdmacm", "mlx5") if machine.find_library(name)]
    if "ibverbs" in there:
        names = ", ".join(f"lib{name}" for name in there)
        return Finding("verbs library", _GOOD, f"{names}; NIXL brings its own")
    return Finding(
        "verbs library",
        _MISSING if is_needed else _NOTE,
        "no libibverbs: Mooncake does not load without it; NIXL brings its own",
        "apt-get install --no-install-recommends libibverbs1",
    )


def _locked_memory(limit_bytes: int, *, has_rdma: bool) -> Finding:
    what = "locked memory"
    if limit_bytes == resource.RLIM_INFINITY:
        return Finding(what, _GOOD, "unlimited")
    text = f"{limit_bytes} bytes; RDMA needs as much as the KV memory, TCP needs none"
    remedy = "ulimit -l unlimited; LimitMEMLOCK=infinity (systemd); --ulimit memlock=-1 (docker)"
    return Finding(what, _WARNING if has_rdma else _NOTE, text, remedy)


# --- what works without any ----------------------------------------------------------------------


def _checksum() -> Finding:
    from trinamo.transports.tcp.transfer.memory import offered

    names = list(offered("auto"))
    if names[0] == "crc32":
        text = "crc32, which costs several times as much CPU as XXH3"
        return Finding("checksums", _NOTE, text, "pip install 'trinamo[checksums]'")
    return Finding("checksums", _GOOD, f"{names[0]} where the peer has it too")


def _transports(found: tuple[str, ...], *, has_rdma: bool) -> Finding:
    """What UCX says it has; devices in brackets."""
    what = "UCX transports"
    if not found:
        return Finding(what, _NOTE, "UCX did not list them")
    names = {each.partition(" ")[0] for each in found}
    text = ", ".join(found)
    is_rdma = any(name.startswith(("rc", "ud", "dc")) for name in names)
    if has_rdma and not is_rdma:
        remedy = "see the rows on RDMA devices and access"
        return Finding(what, _WARNING, f"{text}; none over RDMA", remedy)
    if not names & {"cma", "xpmem"}:
        return Finding(what, _NOTE, f"{text}; no copies on one host (cma)")
    return Finding(what, _GOOD, text if is_rdma else f"{text}; none over RDMA")


# --- /sys ----------------------------------------------------------------------------------------


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return "unknown"


def _word(path: Path) -> str:
    """`ACTIVE` of `4: ACTIVE`."""
    text = _read(path)
    return text.partition(": ")[2] or text
