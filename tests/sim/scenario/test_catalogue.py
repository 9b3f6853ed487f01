"""Every shipped scenario holds, replays exactly, and its planted mutants are found."""

from __future__ import annotations

import tomllib
import zlib
from pathlib import Path

import pytest

from trinamo.cli.sim.files import scenario_of
from trinamo.sim import Policy, ReplayChoices, SeedChoices, first_difference
from trinamo.sim.catalogue import scenario_paths
from trinamo.sim.cluster.plans import Mutant, Scenario
from trinamo.sim.explore import Scenario as Play, played, run as explore
from trinamo.sim.mutants import BUGS
from trinamo.sim.mutants.planting import Patch, bug
from trinamo.sim.scenario.file import load_scenario
from trinamo.sim.scenario.play import play_of
from trinamo.sim.scenario.run import run_scenario

PATHS = scenario_paths()
MUTANTS = [(path, mutant) for path in PATHS for mutant in load_scenario(path).mutants]
POLICIES: tuple[Policy, ...] = ("batch", "step", "pct")
CARRIERS = ("multiplexed", "dedicated")
PINNED = [
    # One silent prefill worker takes the KV pool of its decode worker if all of it may be lent.
    ("kv_writer_cut", 3, "batch", None),
    ("kv_writer_cut", 10, "batch", None),
    # A consumer is stopped while its job comes: the lease is over before it begins to count.
    ("s10_queue_consumers", 3123608422, "batch", None),
    # A consumer that was stopped goes on with a job that it was given before, and another since.
    ("queue_stranger", 3823662223, "step", None),
    # A lease ends while the broker has no leader: what is said of it then is no word about the next one.
    ("queue_stranger", 1000228, "step", None),
    # What is dead loses its power, which is no second death.
    ("transfer_peer_dies", 705507511, "step", "dedicated"),
    # A prefill worker that is cut off is not told that nobody waits for it any more.
    ("prefill_cut_prefill_first", 3661286659, "step", "dedicated"),
    # A call home is reset in its greeting, and made once more.
    ("link_reset", 3223511769, "batch", None),
]
DEDICATED = [
    "handler_finishes",
    "handler_raises_later",
    "client_disconnects",
    "consumer_drops",
    "stop",
    "kill",
    "reasons",
    "stop_then_kill",
    "data_crosses_kill",
    "worker_dies",
    "caller_dies",
    "s9_kill_and_sentinel",
    "slow_reader",
    "exchange_cut",
    "exchange_killed",
    "exchange_worker_dies",
]
"""Those whose mistakes are planted on a connection for each stream as well."""
EVERYWHERE = [(path, mutant, "") for path, mutant in MUTANTS] + [
    (path, mutant, "dedicated") for path, mutant in MUTANTS if path.stem in DEDICATED
]
FIRST = {mutant.bug: (path, mutant, "") for path, mutant in reversed(MUTANTS)}
"""One scenario for each mistake; `make search` plants it in all others as well."""
PLANTED = [
    pytest.param(
        *each,
        id=f"{each[0].stem}-{each[1].bug}-{each[2]}",
        marks=[] if FIRST[each[1].bug] == each else [pytest.mark.search],
    )
    for each in EVERYWHERE
]
ROWS = {
    "handler finishes",
    "handler raises before its first item",
    "handler raises later",
    "client disconnects",
    "consumer drops the stream",
    "stop()",
    "Stop by a worker's or frontend's shutdown",
    "kill()",
    "Stop then Kill",
    "data crosses Kill on the wire",
    "worker process dies (FIN or RST) without end mark",
    "caller dies (FIN or RST)",
    "half-open link",
    "unknown subject, taken subject, malformed handshake",
    "handshake never comes",
    "oversize or malformed frame",
    "descriptor exhaustion in accept",
}
"""The event table of the stream protocol."""
FAILURES = {f"S{number}" for number in range(1, 13)}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_shipped_scenario_holds(path: Path) -> None:
    """No rule is broken on a seed of its own, which is the same in every run of the tests."""
    play, again = drawn(path, seed_of(path))
    finding = played(play, seed_of(path)).run.finding
    assert finding is None, f"{finding}\nplay it again with\n  {again}"


@pytest.mark.check
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_shipped_scenario_replays_exactly(path: Path) -> None:
    """The choices of a run make the same run again."""
    play, again = drawn(path, seed_of(path))
    first = played(play, seed_of(path))
    replayed = played(play, ReplayChoices(first.run.values, seed_of(path)))
    assert first_difference(first.trace, replayed.trace) == "", again
    assert first.run.digest == replayed.run.digest, again


def seed_of(path: Path) -> int:
    return zlib.crc32(path.stem.encode())


def drawn(path: Path, seed: int) -> tuple[Play, str]:
    """A scenario under the policy and on the carrier that a seed says, and how to play that again."""
    policy, streams = POLICIES[seed % 3], "" if is_bound(path) else CARRIERS[seed % 2]
    again = f"trinamo sim run {path.stem} --seed {seed} --policy {policy}"
    again += f" --streams {streams}" if streams else ""
    return scenario_of(path.stem, policy=policy, streams=streams or None), again


@pytest.mark.check
@pytest.mark.parametrize(("name", "seed", "policy", "streams"), PINNED)
def test_a_seed_that_once_broke_a_scenario_does_not(
    name: str, seed: int, policy: Policy, streams: str | None
) -> None:
    assert played(scenario_of(name, policy=policy, streams=streams), seed).run.finding is None


def is_bound(path: Path) -> bool:
    """Whether the scenario is about one carrier, or none."""
    scenario = load_scenario(path)
    return scenario.queue is not None or scenario.streams is not None


@pytest.mark.parametrize(("path", "mutant", "streams"), PLANTED)
def test_a_planted_bug_is_found(path: Path, mutant: Mutant, streams: str) -> None:
    """A simulator that finds nothing may be blind: each known mistake, put back, must show.

    In one place here; `make search` plants it in all others, and on a connection for each stream.
    """
    scenario = load_scenario(path)
    find(scenario.on("dedicated") if streams == "dedicated" else scenario, mutant)


def test_streams_share_connections_unless_they_are_told_otherwise() -> None:
    """Workers call their callers once, or once for each answer."""
    scenario = load_scenario(next(path for path in PATHS if path.stem == "handler_finishes"))
    calls = []
    for each in (scenario, scenario.on("dedicated")):
        outcome = run_scenario(each, SeedChoices(1))
        ends = [
            (str(row.field("source")), str(row.field("target")))
            for row in outcome.world.trace.of_kind("connect")
        ]
        to = ("frontend", "client")
        calls.append([end for end in ends if end[0].startswith("worker") and end[1].startswith(to)])
    assert len(calls[0]) == len(set(calls[0])) <= 4
    assert len(calls[1]) == 9


SHOWN_BY = {
    "leases_outlive_their_time": 3,
    "links_in_use_are_shed": 3,
    "nobody_is_unknown": 4,
    "nothing_is_sealed": 11,
    "proof_unchecked": 14,
    "records_unread": 4,
    "silent_is_gone": 5,
    "stale_ack": 6,
    "unanswered_is_gone": 5,
}
"""Seeds to try first; other changes may move the place where a mistake shows."""


def find(scenario: Scenario, mutant: Mutant) -> None:
    """Play with the mistake until a rule is broken, or until something that the scenario expects is missing.

    A run may miss what is expected by chance: it counts if the same seed has it without the mistake.
    """
    likely = SHOWN_BY.get(mutant.bug, 1)
    for seed in dict.fromkeys((likely, *range(1, min(mutant.seeds_max, 60) + 1))):
        outcome = run_scenario(scenario, SeedChoices(seed), bug=mutant.bug)
        if any(violation.invariant == mutant.finds for violation in outcome.violations):
            return
        if mutant.finds == "expected" and not outcome.violations and outcome.world.untested:
            sound = run_scenario(scenario, SeedChoices(seed))
            if not sound.violations and not sound.world.untested:
                return
    pytest.fail(f"{mutant.bug} was not found")


def _covers(path: Path) -> list[str]:
    found: list[str] = tomllib.loads(path.read_text("utf-8")).get("covers", [])
    return found


def test_every_row_of_the_event_table_has_a_scenario() -> None:
    covered = {each for path in PATHS for each in _covers(path)}
    assert sorted((ROWS | FAILURES) - covered) == []


def test_every_scenario_has_a_mutant_and_every_bug_is_in_use() -> None:
    assert [path.stem for path in PATHS if not load_scenario(path).mutants] == []
    assert sorted(set(BUGS) - {mutant.bug for _, mutant in MUTANTS}) == []


def test_a_planted_bug_is_gone_after_its_run() -> None:
    path = next(path for path in PATHS if path.stem == "stop")
    scenario = load_scenario(path)
    assert run_scenario(scenario, SeedChoices(1), bug="stop_unheard").violations
    assert not run_scenario(scenario, SeedChoices(1)).violations


def test_two_mistakes_must_not_have_one_name() -> None:
    def stop_unheard() -> list[Patch]:
        return []

    with pytest.raises(AssertionError, match="two mistakes are called stop_unheard"):
        bug(stop_unheard)


def test_the_searchers_can_play_a_scenario_file() -> None:
    path = next(path for path in PATHS if path.stem == "stop")
    assert explore(play_of(path), 1).finding is None
    finding = explore(play_of(path, bug="stop_unheard"), 1).finding
    assert finding is not None
    assert finding.invariant == "I3"
