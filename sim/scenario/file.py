"""Scenario files: TOML in, a `Scenario` out, or an error that names file, line and nearest word.

The tables are the fields of the plans, name by name: `[cluster]`, `[engine]`, `[network]`,
`[memory]`, `[link."a->b"]`, `[[workload]]`, `[[byzantine]]`, `[[fault]]`, `[limits]`, `[liveness]`, `[expect]`,
`[[mutant]]`; `[queue]` stands instead of a cluster. `docs/simulation.md` lists them. Nothing is started here.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_type_hints

import attrs
import msgspec

from trinamo.runtime.config.config import load_config
from trinamo.runtime.engines.mocker.engine import MockerOptions
from trinamo.runtime.errors import ConfigError
from trinamo.runtime.protocol.streams.request import Carrier

from ..checks import INVARIANTS
from ..cluster.byzantine import ACTS, ByzantineClient
from ..cluster.cluster import ClusterPlan
from ..cluster.memory import MemoryPlan
from ..cluster.plans import (
    Expect,
    FaultPlan,
    Limits,
    LinkPlan,
    LivenessBound,
    Mutant,
    NetworkPlan,
    QueuePlan,
    Scenario,
)
from ..cluster.workload import ClientProfile
from ..core.policies import Policy
from ..mutants import BUGS
from .faults import FAULTS, HOSTLESS, LINKED

T = TypeVar("T")
TOP: Final = (
    "name", "about", "covers", "policy", "streams", "cluster", "engine", "network", "link", "workload", "byzantine",
    "fault", "limits", "liveness", "expect", "memory", "mutant", "queue",
)  # fmt: skip
CLUSTER: Final = ("frontends", "workers", "prefills", "config", "ready_timeout_s")
RENAMED: Final = {"for": "lasts_s"}
"""Words of the file that Python keeps for itself."""
NOTES: Final = (
    "accept.failed", "cancel.kill", "cancel.stop", "caller.done", "caller.input", "caller.input_end", "caller.kill", "caller.ready", "caller.refused", "caller.state", "caller.stop",
    "drain.begin", "drain.end", "engine.adopted", "engine.begin", "engine.end", "engine.filled", "engine.input", "engine.input_end", "engine.killed", "engine.reserved",
    "engine.stopped", "engine.token", "etcd.watch", "events.gap", "events.snapshot", "fault", "fault.over", "frontend.left", "frontend.ready",
    "frontend.told", "http.answered", "instance.join", "instance.leave", "instance.return", "instance.stale", "kv.asked", "kv.fallback",
    "kv.forget", "kv.move", "kv.quarantine", "kv.readmit", "kv.reconnect", "lease.granted",
    "lease.lost", "lease.restored", "load.begin", "load.end", "migration", "prefill.local", "prefill.remote", "request.begin", "request.end", "byzantine.end",
    "router.inhibit", "router.probe", "router.silence", "router.suspect", "router.trust", "settled", "store.expire", "store.grant", "store.renew", "store.restart",
    "store.revoke", "stranger.said", "stream.open", "stream.token", "watch.event", "worker.begin", "worker.end",
    "worker.left", "worker.ready", "worker.serve", "worker.told",
)  # fmt: skip
"""Every kind of note that a fault may wait for."""


def load_scenario(path: str | Path) -> Scenario:
    """Read one file; raises `ConfigError` with file, line and what the nearest valid word is."""
    path = Path(path)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{path}: cannot be read: {why}") from error
    return parse_scenario(text, str(path))


def parse_scenario(text: str, where: str = "scenario") -> Scenario:
    """As `load_scenario`, from the text of a file called `where`."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: {error}") from error
    return _Reader(text, where).scenario(table)


class _Reader:
    def __init__(self, text: str, where: str) -> None:
        self._lines = text.splitlines()
        self._where = where

    # --- errors ----------------------------------------------------------------------------

    def _fail(self, header: str, number: int, key: str, message: str) -> ConfigError:
        return ConfigError(f"{self._where}, line {self._line(header, number, key)}: {message}")

    def _line(self, header: str, number: int, key: str) -> int:
        """Where `key` stands in the `number`-th table called `header`; 1 if it cannot be told."""
        seen, inside, found = 0, not header, 1
        for line_number, line in enumerate(self._lines, 1):
            stripped = line.strip()
            if stripped.startswith("["):
                title = stripped.split("#")[0].strip(" []")
                if not header and title.split(".")[0] == key:
                    return line_number
                inside = title == header
                if inside:
                    seen += 1
                    if seen == number + 1:
                        found = line_number
            if inside and seen in (number + 1, 0) and _key_of(stripped) == key:
                return line_number
        return found

    def _check_word(
        self, header: str, number: int, key: str, what: str, word: str, known: Collection[str]
    ) -> None:
        if word in known:
            return
        words = sorted(map(str, known))
        near = get_close_matches(word, words, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(words)}"
        raise self._fail(header, number, key, f"unknown {what} {word!r}; {hint}")

    # --- tables ----------------------------------------------------------------------------

    def _check_keys(
        self, table: Mapping[str, Any], known: Collection[str], header: str, number: int = 0
    ) -> None:
        for key in table:
            self._check_word(header, number, key, "key", key, known)

    def _build(
        self, cls: type[T], table: Mapping[str, Any], header: str, number: int = 0, **more: Any
    ) -> T:
        """An attrs object from a table, every value checked against the field's type."""
        hints = get_type_hints(cls)
        to_file = {field: word for word, field in RENAMED.items()}
        fields = [f.name for f in attrs.fields(cls) if f.name not in more]  # type: ignore[arg-type]
        self._check_keys(table, [str(to_file.get(f, f)) for f in fields], header, number)
        values: dict[str, Any] = dict(more)
        for key, value in table.items():
            field = RENAMED.get(key, key)
            try:
                values[field] = msgspec.convert(value, hints[field], strict=False)
            except msgspec.ValidationError as error:
                raise self._fail(header, number, key, f"{key}: {error}") from error
        try:
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise self._fail(header, number, "", f"[{header}]: {error}") from error

    def _each(
        self, table: Mapping[str, Any], header: str, make: Callable[[dict[str, Any], int], T]
    ) -> tuple[T, ...]:
        found = table.get(header, [])
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            raise self._fail(header, 0, header, f"write [[{header}]], one for each {header}")
        return tuple(make(each, number) for number, each in enumerate(found))

    def _table(self, table: Mapping[str, Any], header: str) -> dict[str, Any]:
        found = table.get(header, {})
        if not isinstance(found, dict):
            raise self._fail("", 0, header, f"{header} is a table: write [{header}]")
        return found

    # --- the whole -------------------------------------------------------------------------

    def scenario(self, table: Mapping[str, Any]) -> Scenario:
        self._check_keys(table, TOP, "")
        for key in ("name", "about"):
            if not isinstance(table.get(key), str):
                raise self._fail("", 0, key, f"{key} is missing: a text is needed")
        policy, streams = table.get("policy"), table.get("streams")
        if policy is not None:
            self._check_word("", 0, "policy", "policy", str(policy), get_args(Policy))
        if streams is not None:
            self._check_word("", 0, "streams", "carrier", str(streams), [*Carrier])
        cluster = self._cluster(table)
        byzantines = self._each(table, "byzantine", partial(self._byzantine, cluster))
        hosts = [*cluster.host_names, *(f"byzantine{number}" for number in range(len(byzantines)))]
        return Scenario(
            name=table["name"],
            about=table["about"],
            policy=policy,
            streams=streams,
            cluster=cluster,
            queue=self._build(QueuePlan, self._table(table, "queue"), "queue")
            if "queue" in table
            else None,
            network=self._build(NetworkPlan, self._table(table, "network"), "network"),
            links=tuple(self._links(table, hosts)),
            byzantines=byzantines,
            faults=self._each(table, "fault", partial(self._fault, hosts)),
            liveness=self._build(LivenessBound, self._table(table, "liveness"), "liveness"),
            limits=self._build(Limits, self._table(table, "limits"), "limits"),
            expect=self._expect(table),
            mutants=self._each(table, "mutant", self._mutant),
        )

    def _cluster(self, table: Mapping[str, Any]) -> ClusterPlan:
        section = self._table(table, "cluster")
        self._check_keys(section, CLUSTER, "cluster")
        more = {name: section[name] for name in CLUSTER if name != "config" and name in section}
        load = self._each(
            table, "workload", lambda each, n: self._build(ClientProfile, each, "workload", n)
        )
        overrides = dict(section.get("config", {}))
        if "streams" in table:
            overrides["data_plane.tcp.streams"] = table["streams"]
        try:
            config = load_config(environ={}, overrides=overrides)
        except ConfigError as error:
            raise self._fail("cluster", 0, "config", error.message) from error
        engine = self._build(MockerOptions, self._table(table, "engine"), "engine")
        memory = self._build(MemoryPlan, self._table(table, "memory"), "memory")
        plan = ClusterPlan(**more, workload=load, config=config, engine=engine, memory=memory)
        for number, profile in enumerate(load):
            if profile.via == "http":
                self._check_host("workload", number, "to", profile.to, plan.host_names)
        return plan

    def _check_host(self, header: str, number: int, key: str, name: str, hosts: list[str]) -> None:
        if not any(fnmatchcase(host, name) for host in hosts):
            self._check_word(header, number, key, "host", name, hosts)

    def _byzantine(
        self, cluster: ClusterPlan, table: dict[str, Any], number: int
    ) -> ByzantineClient:
        byzantine = self._build(ByzantineClient, table, "byzantine", number)
        self._check_word("byzantine", number, "act", "act", byzantine.act, ACTS)
        self._check_host("byzantine", number, "to", byzantine.to, cluster.host_names)
        return byzantine

    def _links(self, table: Mapping[str, Any], hosts: list[str]) -> Iterable[LinkPlan]:
        for name, section in self._table(table, "link").items():
            header = f'link."{name}"'
            match = re.fullmatch(r"(\S+?)(<->|->)(\S+)", name)
            if match is None:
                raise self._fail(header, 0, "", f"{name!r} is no link; write a->b or a<->b")
            source, arrow, target = match.groups()
            for host in (source, target):
                self._check_host(header, 0, "", host, hosts)
            ends: dict[str, Any] = {
                "source": source,
                "target": target,
                "is_both_ways": arrow == "<->",
            }
            yield self._build(LinkPlan, section, header, **ends)

    def _fault(self, hosts: list[str], table: dict[str, Any], number: int) -> FaultPlan:
        fault = self._build(FaultPlan, table, "fault", number)
        self._check_word("fault", number, "do", "fault", fault.do, FAULTS)
        if fault.do not in HOSTLESS:
            self._check_host("fault", number, "on", fault.on, hosts)
        if fault.do in LINKED:
            self._check_host("fault", number, "to", fault.to, hosts)
        if (fault.at is None) == (not fault.after_note):
            raise self._fail("fault", number, "do", "give exactly one of at and after_note")
        if fault.do == "restore" and fault.lasts_s == math.inf:
            # The fault begins with the backup, and without an end nothing would happen.
            raise self._fail("fault", number, "do", "restore needs for: when the backup comes back")
        kind, _, nth = fault.after_note.partition("#")
        if kind:
            self._check_word("fault", number, "after_note", "note", kind, NOTES)
        if nth and not (nth.isdecimal() and int(nth) > 0):
            raise self._fail("fault", number, "after_note", f"#{nth} is no number from 1 on")
        return fault

    def _expect(self, table: Mapping[str, Any]) -> Expect:
        expect = self._build(Expect, self._table(table, "expect"), "expect")
        for invariant in expect.invariants:
            self._check_word("expect", 0, "invariants", "invariant", invariant, INVARIANTS)
        burst = (expect.burst_note,) if expect.burst_note else ()
        for key, kinds in (
            ("notes", expect.notes), ("never", expect.never), ("burst_note", burst)
        ):  # fmt: skip
            for kind in kinds:
                self._check_word("expect", 0, key, "note", kind, NOTES)
        return expect

    def _mutant(self, table: dict[str, Any], number: int) -> Mutant:
        mutant = self._build(Mutant, table, "mutant", number)
        self._check_word("mutant", number, "bug", "bug", mutant.bug, BUGS)
        self._check_word("mutant", number, "finds", "invariant", mutant.finds, INVARIANTS)
        return mutant


def _key_of(line: str) -> str:
    key, equals, _ = line.partition("=")
    return key.strip().strip('"') if equals else ""
