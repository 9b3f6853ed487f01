"""What `trinamo doctor` looks at: packages, engines, servers, ports, limits. It changes nothing for good.

Addresses are shown, passwords and tokens never: no finding reads one.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import trio

from trinamo.runtime.config.config import Config, SecurityTlsConfig
from trinamo.runtime.config.http import HttpTlsConfig
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import ConfigError, TrinamoError
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.planes import ControlPlane, EventPlane
from trinamo.transports.assembly.planes import open_control_plane, open_event_plane
from trinamo.transports.http.certificates import Certificates
from trinamo.transports.sockets.certificates import key_faults

from ..children.shared_port import check_port
from ..running.frontends_file import find_frontends
from ..running.locating import Target, somebody_listens
from ..serve.engine import choose_engine
from .discovery import discovery_findings
from .finding import Finding, FindingVerdict
from .transfer import transfer_findings

OPEN_FILES_MIN: Final = 4096
"""A frontend at its default bounds holds 2048 clients and a stream for each."""
OPEN_FILES_WANTED: Final = 65_536
ASK_TIMEOUT_S: Final = 8.0
JOBS_REMEDY: Final = (
    "make room where nats-server keeps JetStream (its log says if the disk is full, or a limit is reached),"
    " and start it again: it takes nothing more into a stream that it could not write into once."
    " Where users have rights: trinamo certs rights --role operator"
)
DAY_S: Final = 86_400
DAYS_MIN: Final = 14
"""Left to a certificate; whoever renews them by machine does so before."""
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")
_EXTRA: Final = re.compile(r"extra\s*==\s*[\"'](\w+)[\"']")


async def examine(target: Target, url: str = "", key: str = "") -> list[Finding]:
    """Look at everything; takes at most a few seconds, also where nothing answers."""
    run, others = target.run, ", ".join(each.url for each in find_frontends() if each.url)
    text = "none was started here by `trinamo up`"
    if others:
        text += f"; frontends that run here: {others}"
    started = Finding("cluster", FindingVerdict.NOTE, text, "" if others or url else "trinamo up")
    if run is not None:
        text = f"`trinamo up`, pid {run.pid}, {run.state}: {run.url or 'not ready yet'}"
        started = Finding("cluster", FindingVerdict.GOOD, text)
    found = [*_packages(target), *_model(target.config), started]
    servers: dict[str, Finding] = {}
    discovered: list[Finding] = []

    async def discover() -> None:
        discovered.extend(await discovery_findings(target, url, key))

    async with open_nursery() as nursery:
        nursery.start_soon(_etcd, target, servers)
        nursery.start_soon(_nats, target, servers)
        nursery.start_soon(discover)
    found += [servers[name] for name in ("etcd", "NATS") if name in servers]
    found += discovered
    found += [*_disk(target.config), _http_port(target)]
    found += [*certificate_findings(target.config, RealEnv().clock.wall()), *_limits()]
    found += await trio.to_thread.run_sync(lambda: list(transfer_findings(target.config)))
    return found


# --- what is installed -----------------------------------------------------------------------


def _packages(target: Target) -> Iterator[Finding]:
    """Python, and what of the package's own requirements is there."""
    text = f"{platform.python_version()} at {sys.executable}"
    if (3, 11) <= sys.version_info[:2] < (3, 14):
        yield Finding("Python", FindingVerdict.GOOD, text)
    else:
        text = f"{text}; 3.11 to 3.13 is needed"
        yield Finding("Python", FindingVerdict.MISSING, text, "make up")
    by_extra: dict[str, list[str]] = {"": [], "cluster": [], "embedded": [], "llamacpp": []}
    try:
        lines = requires("trinamo") or []
        text = f"{version('trinamo')} with "
    except PackageNotFoundError:
        yield Finding(
            "trinamo", FindingVerdict.WARNING, "runs without being installed", "pip install ."
        )
        return
    for line in lines:
        marker = _EXTRA.search(line)
        name = _NAME.match(line)
        key = str(marker[1]) if marker else ""
        if name and key in by_extra and name[0] != "trinamo":
            by_extra[key].append(name[0])
    there, missing = _versions(by_extra[""])
    if missing:
        yield Finding(
            "trinamo",
            FindingVerdict.MISSING,
            f"{text}{there}; without {missing}",
            "pip install trinamo",
        )
    else:
        yield Finding("trinamo", FindingVerdict.GOOD, text + there)
    section = target.config.control_plane
    needs = {
        "cluster": not target.config.http.upstreams,
        # `trinamo up` would start servers of its own with this configuration.
        "embedded": target.run is not None
        or (section.backend == "etcd" and section.embedded is not False and not target.is_named),
        "llamacpp": target.config.worker.engine == "llamacpp",
    }
    for extra, is_needed in needs.items():
        there, missing = _versions(by_extra[extra])
        if missing:
            verdict = FindingVerdict.MISSING if is_needed else FindingVerdict.WARNING
            remedy = f"pip install 'trinamo[{extra}]'"
            yield Finding(f"extra {extra}", verdict, f"without {missing}", remedy)
        else:
            yield Finding(f"extra {extra}", FindingVerdict.GOOD, there)


def _versions(names: list[str]) -> tuple[str, str]:
    """What is there with its version, and what is missing."""
    there, missing = [], []
    for name in names:
        try:
            there.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    return ", ".join(there), ", ".join(missing)


def _model(config: Config) -> Iterator[Finding]:
    from trinamo.runtime.engines.llamacpp.model_file import (
        FETCH_COMMAND,
        find_model,
    )

    is_needed = config.worker.engine == "llamacpp"
    try:
        path = find_model(config.worker.model_path)
    except ConfigError as error:
        verdict = FindingVerdict.MISSING if is_needed else FindingVerdict.WARNING
        text = error.message
        if config.weights.enabled:
            text += "; or from a peer, where the row on weights names one"
        yield Finding("model file", verdict, text, FETCH_COMMAND)
    else:
        size = path.stat().st_size / 1e6
        yield Finding("model file", FindingVerdict.GOOD, f"{path} ({size:.0f} MB)")
    for section in config.worker.by_model():
        what = f"engine of {section.model_name}" if config.worker.models else "engine"
        try:
            choice = choose_engine(section)
        except ConfigError as error:
            yield Finding(what, FindingVerdict.MISSING, error.message)
        else:
            yield Finding(what, FindingVerdict.GOOD, f"{choice.engine}: {choice.why}")


# --- what runs -------------------------------------------------------------------------------


async def _etcd(target: Target, found: dict[str, Finding]) -> None:
    section = target.config.control_plane
    if section.backend != "etcd":
        found["etcd"] = Finding(
            "etcd", FindingVerdict.NOTE, f"control_plane.backend is {section.backend}"
        )
        return
    endpoints = section.etcd.endpoints
    found["etcd"] = await _server(
        "etcd", endpoints, target, open_control_plane(section.etcd, list(endpoints))
    )


async def _nats(target: Target, found: dict[str, Finding]) -> None:
    section = target.config.event_plane
    if section.backend != "nats":
        found["NATS"] = Finding(
            "NATS", FindingVerdict.NOTE, f"event_plane.backend is {section.backend}"
        )
        return
    servers = section.nats.servers
    found["NATS"] = await _server(
        "NATS", servers, target, open_event_plane(section.nats, list(servers))
    )


async def _server(
    name: str,
    addresses: tuple[str, ...],
    target: Target,
    opened: AbstractAsyncContextManager[ControlPlane | EventPlane],
) -> Finding:
    where = ", ".join(addresses)
    # Quick for the usual case, in which nothing was started yet.
    if not any([await somebody_listens(each) for each in addresses]):
        if target.is_named or target.run is not None:
            return Finding(
                name, FindingVerdict.MISSING, f"nothing answers at {where}", f"start {name} there"
            )
        return Finding(name, FindingVerdict.NOTE, f"none at {where}; `trinamo up` starts its own")
    with trio.move_on_after(ASK_TIMEOUT_S):
        try:
            async with opened as plane:
                line = await plane.check_health()
                remedy = ""
                if fault := await _job_fault(plane, line):
                    line, remedy = (
                        f"{line}; warning: work queues take no jobs: {fault}",
                        JOBS_REMEDY,
                    )
        except TrinamoError as error:
            return Finding(name, FindingVerdict.MISSING, error.message, f"check {name} at {where}")
        verdict = FindingVerdict.WARNING if "warning" in line else FindingVerdict.GOOD
        return Finding(name, verdict, line, remedy)
    return Finding(name, FindingVerdict.MISSING, f"no answer at {where} in {ASK_TIMEOUT_S:g} s")


async def _job_fault(plane: ControlPlane | EventPlane, health: str) -> str:
    """Why JetStream takes no messages, where there is one; etcd's own line says whether it takes writes."""
    from trinamo.transports.nats import WITHOUT_JETSTREAM, NatsEventPlane

    if isinstance(plane, NatsEventPlane) and WITHOUT_JETSTREAM not in health:
        try:
            await plane.try_write()
        except TrinamoError as error:
            return error.message
    return ""


def _http_port(target: Target) -> Finding:
    http = target.config.http
    if target.run is not None and target.run.url:
        return Finding("HTTP port", FindingVerdict.GOOD, f"served: {target.run.url}")
    for file in find_frontends():
        if urlsplit(file.url).port == http.port:
            text = f"served: {file.url}, by `trinamo frontend`, pid {file.pid}"
            return Finding("HTTP port", FindingVerdict.GOOD, text)
    try:
        check_port(http.host, http.port)
    except ConfigError as error:
        return Finding("HTTP port", FindingVerdict.WARNING, error.message, "trinamo up --port 0")
    return Finding("HTTP port", FindingVerdict.GOOD, f"{http.host} port {http.port} is free")


def _disk(config: Config) -> Iterator[Finding]:
    """Whether an embedded etcd keeps its log on the kind of disk it is planned with."""
    etcd = config.control_plane.etcd
    if not etcd.ssd or etcd.data_dir is None or config.control_plane.embedded is False:
        return
    if spins(Path(etcd.data_dir)):
        text = f"control_plane.etcd.ssd is true, and {etcd.data_dir} is on a disk that spins"
        yield Finding("disk", FindingVerdict.WARNING, text, "set control_plane.etcd.data_dir")
    else:
        yield Finding("disk", FindingVerdict.GOOD, f"{etcd.data_dir} is on no disk that spins")


def spins(path: Path, *, devices: Path = Path("/sys/dev/block")) -> bool:
    """Whether the kernel says so of the disk that holds `path`, or will hold it."""
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    number = there.stat().st_dev
    device = (devices / f"{os.major(number)}:{os.minor(number)}").resolve()
    # A partition has no queue; its disk is the folder above.
    flags = [folder / "queue" / "rotational" for folder in (device, device.parent)]
    return any(flag.is_file() and flag.read_text().strip() == "1" for flag in flags)


def certificate_findings(config: Config, now: float) -> Iterator[Finding]:
    """Whether the files of `http.tls` and `security.tls` can be used, and for how long.

    Nothing of one that is not configured. `now` is in seconds since 1970.
    """
    clients, members = config.http.tls, config.security.tls
    if clients.certificate_file is not None:
        yield from _certificate("http.tls", clients, lambda: Certificates(clients).expires_at, now)
    if members.certificate_file is not None:
        # Brings `cryptography` along, which who has no secret never needs.
        from trinamo.transports.security.fleet import Fleet

        def load() -> float:
            return Fleet.of(members, RealEnv()).certificate.expires_at

        yield from _certificate("security.tls", members, load, now)


def _certificate(
    key: str, section: HttpTlsConfig | SecurityTlsConfig, load: Callable[[], float], now: float
) -> Iterator[Finding]:
    try:
        expires_at = load()
    except ConfigError as error:
        yield Finding(
            "certificate", FindingVerdict.MISSING, error.message, f"mend the files of {key}"
        )
        return
    for fault in key_faults(f"{key}.key_file", section.key_file):
        yield Finding("certificate", FindingVerdict.WARNING, fault)
    days = int((expires_at - now) // DAY_S)
    end = datetime.fromtimestamp(expires_at, UTC)
    text = f"{section.certificate_file} ends on {end:%Y-%m-%d}"
    if days < 0:
        yield Finding("certificate", FindingVerdict.MISSING, f"{text}: it is over", "renew it")
    elif days < DAYS_MIN:
        yield Finding("certificate", FindingVerdict.WARNING, f"{text}, in {days} days", "renew it")
    else:
        yield Finding("certificate", FindingVerdict.GOOD, text)


def _limits() -> Iterator[Finding]:
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    text = f"{soft or 'unlimited'}, at most {hard or 'unlimited'}"
    if soft is not None and soft < OPEN_FILES_MIN:
        raised = min(OPEN_FILES_WANTED, hard or OPEN_FILES_WANTED)
        yield Finding("open files", FindingVerdict.WARNING, text, f"ulimit -n {raised}")
    else:
        yield Finding("open files", FindingVerdict.GOOD, text)
