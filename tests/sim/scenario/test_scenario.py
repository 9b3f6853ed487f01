"""Scenario files: what they may say, and what is said about those that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinamo.runtime.errors import ConfigError
from trinamo.sim import SeedChoices
from trinamo.sim.scenario.faults import FAULTS, HOSTLESS, LINKED
from trinamo.sim.scenario.file import load_scenario, parse_scenario
from trinamo.sim.scenario.play import run
from trinamo.sim.scenario.run import run_scenario

HEAD = 'name = "a"\nabout = "b"\n'


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[cluster]\nworker = 2", 4, "unknown key 'worker'; did you mean 'workers'?"),
        ("[worklod]\n", 3, "unknown key 'worklod'; did you mean 'workload'?"),
        ("[[workload]]\nclients = 2\n\nrequets = 1", 6, "did you mean 'requests'?"),
        ("[[workload]]\n[[workload]]\nclients = 'x'", 5, "clients: "),
        (
            '[[workload]]\nto = "frontend7"',
            4,
            "unknown host 'frontend7'; did you mean 'frontend0'?",
        ),
        ('[[fault]]\ndo = "kil"\non = "worker0"\nat = 1', 4, "did you mean 'kill'?"),
        ('[[fault]]\ndo = "kill"\non = "wrker0"\nat = 1', 5, "did you mean 'worker0'?"),
        ('[[fault]]\ndo = "cut"\non = "worker0"\nat = 1', 3, "unknown host ''"),
        (
            '[[fault]]\ndo = "kill"\non = "worker0"\nafter_note = "strem.token#3"',
            6,
            "unknown note 'strem.token'; did you mean 'stream.token'?",
        ),
        (
            '[[fault]]\ndo = "kill"\non = "worker0"\nafter_note = "stream.token#0"',
            6,
            "#0 is no number from 1 on",
        ),
        ('[[fault]]\ndo = "kill"\non = "worker0"', 4, "exactly one of at and after_note"),
        ('[[fault]]\ndo = "restore"\nat = 1', 4, "restore needs for"),
        ('[expect]\ninvariants = ["I99"]', 4, "unknown invariant 'I99'"),
        ('[[mutant]]\nbug = "nack_is_succes"\nfinds = "I15"', 4, "did you mean 'nack_is_success'?"),
        ('[[byzantine]]\nact = "silense"', 4, "did you mean 'silence'?"),
        ('[link."worker0->stor"]\nlatency_s = 1', 3, "did you mean 'store'?"),
        ('[link."worker0-store"]\nlatency_s = 1', 3, "is no link; write a->b or a<->b"),
        ('streams = "dedicate"', 3, "unknown carrier 'dedicate'; did you mean 'dedicated'?"),
        ('policy = "bach"', 3, "unknown policy 'bach'; did you mean 'batch'?"),
        ('[cluster]\nconfig = { "http.prt" = 1 }', 4, "http.prt"),
        ("[engine]\nspeedup_ratio = 0", 3, "must be more than 0"),
        ("[memory]\nbackends = []", 3, "must name at least one"),
        ("[memory]\nwindow = 0", 3, "at least 1"),
        ('[memory]\nbackends = ["rdma"]', 4, "rdma"),
        ("[transfers]\n", 3, "unknown key 'transfers'"),
    ],
)
def test_a_wrong_scenario_is_told_by_file_line_and_nearest_word(
    text: str, line: int, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_scenario(HEAD + text, "storm.toml")
    assert f"storm.toml, line {line}: " in caught.value.message
    assert words in caught.value.message


def test_what_is_no_toml_or_no_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"x.toml: .*line 2"):
        parse_scenario("a = 1\nname = nothing\n", "x.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_scenario(tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match="name is missing"):
        parse_scenario("")


def test_links_have_the_latency_their_tables_say() -> None:
    text = (
        '[[workload]]\nrequests = 1\n[link."client*<->frontend0"]\nlatency_s = 0.1\njitter_s = 0.0'
    )
    outcome = run_scenario(parse_scenario(HEAD + text), SeedChoices(1))
    record = outcome.cluster.records[0]
    assert record.ended_s is not None
    # A handshake and the exchange: two ways forth and back.
    assert record.ended_s - record.started_s > 0.4


def test_a_fault_after_the_nth_note_strikes_there_and_a_range_is_drawn_from() -> None:
    text = (
        '[[workload]]\noutput_tokens = [9, 9]\n[[fault]]\ndo = "kill"\non = "worker*"\n'
        'after_note = "stream.token#5"\ndelay = [0.0, 0.004]'
    )
    scenario = parse_scenario(HEAD + text)
    outcome = run_scenario(scenario, SeedChoices(1))
    rows = outcome.world.trace.rows
    fault = next(row for row in rows if row.kind == "fault")
    before = [row for row in rows if row.kind == "stream.token" and row.time_s <= fault.time_s]
    assert len(before) == 5
    times = {
        next(
            r.time_s for r in run_scenario(scenario, SeedChoices(seed)).world.trace.of_kind("fault")
        )
        for seed in range(4)
    }
    assert len(times) > 1


def test_a_scenario_that_never_ends_hits_its_limits_and_says_what_was_runnable() -> None:
    text = "[[workload]]\nrequests = 100\npause_s = [1, 1]\n[limits]\nvirtual_s = 5"
    outcome = run_scenario(parse_scenario(HEAD + text), SeedChoices(1))
    assert [violation.invariant for violation in outcome.violations[:1]] == ["I15"]
    assert "TimeLimit: 5" in outcome.violations[0].text
    assert "client0.1" in outcome.violations[0].text


def test_faults_can_be_left_out_for_a_shrinker() -> None:
    text = HEAD + (
        '[[workload]]\nrequests = 2\n[[fault]]\ndo = "kill"\non = "worker0"\nat = 0.01\n'
        '[[fault]]\ndo = "kill"\non = "worker1"\nat = 0.01\n[expect]\nnotes = ["fault"]'
    )
    outcome = run(SeedChoices(1), text=text, faults=[])
    assert [record.outcome for record in outcome.cluster.records] == ["complete"] * 2
    assert len(run(SeedChoices(1), text=text, faults=[1]).world.trace.of_kind("fault")) == 1


ONE_FAULT = """
name = "one-fault"
about = "every fault word does what it says, and the cluster lives"
[cluster]
workers = 2
[engine]
[[workload]]
clients = 2
requests = 3
[[fault]]
do = "{do}"
{on}
at = 0.2
for = 1.0
{more}
"""


@pytest.mark.parametrize("do", FAULTS)
def test_every_fault_word_can_be_carried_out(do: str) -> None:
    on = 'on = "worker0"' if do not in HOSTLESS else ""
    more = {"skew": "seconds = 30.0", "lose_replies": "count = 1"}.get(do, "")
    if do in LINKED:
        more = 'to = "frontend0"'
    text = ONE_FAULT.format(do=do, on=on, more=more)
    if do in ("stop", "skew", "lose_replies", "reset", "compact", "boot"):
        text = text.replace("for = 1.0\n", "")

    outcome = run_scenario(parse_scenario(text, "one.toml"), SeedChoices(3))

    assert [b for b in outcome.violations if b.invariant == "crash"] == []
    assert any(row.kind == "fault" for row in outcome.world.trace.rows)


def test_a_link_is_shaped_in_every_respect() -> None:
    text = ONE_FAULT.format(do="compact", on="", more="").replace("for = 1.0\n", "")
    text += (
        '[link."worker*->frontend0"]\nlatency_s = 0.01\njitter_s = 0.0\n'
        "bytes_per_s = 1e6\nloss_one_in = 50\nfin_delay_s = 0.5\n"
    )

    outcome = run_scenario(parse_scenario(text, "links.toml"), SeedChoices(1))

    link = outcome.network.link("worker0", "frontend0")
    assert (link.latency_s, link.jitter_s) == (0.01, 0.0)
    assert (link.bytes_per_s, link.loss_one_in, link.fin_delay_s) == (1e6, 50, 0.5)
    assert not outcome.violations
