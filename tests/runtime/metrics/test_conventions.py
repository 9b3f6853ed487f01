"""Every name on every process's page keeps to Prometheus' conventions, or is a known second name.

https://prometheus.io/docs/practices/naming/: a prefix, base units last, `_total` on counters alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.runtime.small_cluster import SmallCluster, open_small_cluster
from tests.sources import ROOT
from trinamo.cli.serve.output import show_losses
from trinamo.runtime.disaggregation.metrics import DecodeMetrics, PrefillMetrics
from trinamo.runtime.env import RealEnv
from trinamo.runtime.http.metrics import FrontendMetrics
from trinamo.runtime.kv.transfer.metrics import ALIASES
from trinamo.runtime.weights.lender import WeightsMetrics
from trinamo.transports.sockets.certificates import CertificateSeries

SECOND_NAMES = {"nixl_transfer_latency", "nixl_bandwidth_gbps", "nixl_error_rate"}
"""Those that the field expects, and that keep to no convention."""
PREFIXES = ("trinamo_", "process_")
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
# What a name says must be a base unit: no multiple, no fraction, and no other word for it.
NO_UNITS = frozenset(
    {
        *("ms", "us", "ns", "millis", "milliseconds", "microseconds", "nanoseconds", "minutes"),
        *("hours", "kb", "mb", "gb", "kib", "mib", "gib", "kilobytes", "megabytes", "gigabytes"),
        *("bits", "gbps", "mbps", "percent", "percentage", "s", "secs", "sec", "latency", "rate"),
    }
)
NOT_OF_TIME = frozenset({"trinamo_inter_token_latency_seconds"})
"""The field's own word, with its unit behind it."""
RESERVED = ("_count", "_sum", "_bucket", "_created")
UNITS = ("_seconds", "_bytes")
"""Of what is spread over buckets."""


def faults(family: Metric) -> Iterator[str]:
    """What is wrong with the name of one family, as Prometheus' parser reads it off a page."""
    name, kind = family.name, family.type
    words = set(name.split("_"))
    if not NAME.fullmatch(name) or not name.startswith(PREFIXES):
        yield f"{name}: not a name with one of our prefixes"
    if name not in NOT_OF_TIME and (wrong := words & NO_UNITS):
        yield f"{name}: {', '.join(sorted(wrong))} is no base unit"
    if name.endswith(RESERVED) or (kind != "counter" and name.endswith("_total")):
        yield f"{name}: ends as the samples of another type do"
    if kind == "histogram" and not name.endswith(UNITS):
        yield f"{name}: a histogram says its unit"
    if not family.documentation:
        yield f"{name}: says nothing of itself"
    for sample in family.samples:
        if kind == "counter" and not sample.name.endswith("_total"):
            yield f"{sample.name}: a counter without _total"
        if not all(NAME.fullmatch(label) for label in sample.labels):
            yield f"{sample.name}: labels {sorted(sample.labels)}"
        if name.endswith("_info") and sample.value != 1:
            yield f"{name}: information is 1"


def families(page: str) -> list[Metric]:
    return [each for each in text_string_to_metric_families(page) if each.name not in SECOND_NAMES]


def unexplained(page: str) -> list[str]:
    """The metrics that no page of the docs has a word for, and what to do: by its name or its family's."""
    told = "".join(path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md"))
    named = re.findall(r"`(\w+?)(?:_total)?(?:…|\{[^`]*\}|)`", told)
    families_of = tuple(re.findall(r"`(trinamo_\w+|process_)…", told))
    names = [each.name for each in families(page)]
    cure = (
        "no page of docs/ has it: give it a row in docs/operations.md, or on the page of its part"
    )
    return [
        f"{each}: {cure}"
        for each in names
        if each not in named and not each.startswith(families_of)
    ]


def test_only_these_have_a_second_name() -> None:
    assert set(ALIASES.values()) == SECOND_NAMES


async def used(cluster: SmallCluster) -> None:
    """Have requests answered and refused, so that what is counted by label has series."""
    assert (await cluster.ask()).status_code == 200
    assert (await cluster.ask(model="none")).status_code == 404


@pytest.mark.parametrize("policy", ["round_robin", "kv"])
async def test_every_name_of_a_frontend_and_a_worker_keeps_to_the_conventions(policy: str) -> None:
    async with open_small_cluster(router__policy=policy) as cluster:
        await used(cluster)
        pages = await cluster.pages()

    for role, page in pages.items():
        assert len(families(page)) > 20, role
        assert [fault for family in families(page) for fault in faults(family)] == []
        assert f'role="{role.partition(" ")[0]}"' in page
        assert unexplained(page) == []
        assert "\nprocess_resident_memory_bytes " in page


async def test_names_that_only_some_processes_have_keep_to_them_too() -> None:
    metrics = FrontendMetrics(RealEnv())
    WeightsMetrics(metrics)
    CertificateSeries(metrics, "http")
    show_losses(metrics)
    DecodeMetrics(metrics, metrics.clock, "decode_first")
    PrefillMetrics(metrics)
    page = metrics.render().decode()

    assert unexplained(page) == []
    assert [fault for family in families(page) for fault in faults(family)] == []


async def test_the_second_names_are_on_a_worker_s_page_and_nowhere_else_is_one() -> None:
    async with open_small_cluster() as cluster:
        pages = await cluster.pages()

    told = {each.name for each in text_string_to_metric_families(pages["worker 0"])}
    assert set(ALIASES) | SECOND_NAMES <= told
    strangers = {name for name in told if not name.startswith(PREFIXES)}
    assert strangers == SECOND_NAMES


@pytest.mark.parametrize(
    "line",
    [
        "# HELP trinamo_x_ms a\n# TYPE trinamo_x_ms gauge\ntrinamo_x_ms 1\n",
        "# HELP x a\n# TYPE x gauge\nx 1\n",
        "# HELP trinamo_x_total a\n# TYPE trinamo_x_total gauge\ntrinamo_x_total 1\n",
        "# HELP trinamo_bandwidth_gbps a\n# TYPE trinamo_bandwidth_gbps gauge\n",
        '# HELP trinamo_x a\n# TYPE trinamo_x gauge\ntrinamo_x{Model="a"} 1\n',
        "# HELP trinamo_x a\n# TYPE trinamo_x histogram\n",
        "# TYPE trinamo_x gauge\ntrinamo_x 1\n",
    ],
)
def test_a_name_that_breaks_a_convention_is_found(line: str) -> None:
    assert [fault for family in families(line) for fault in faults(family)]


async def test_an_engine_s_gauges_tell_what_it_holds_and_what_it_need_not_compute() -> None:
    prompt = "the same words again and again " * 12
    async with open_small_cluster() as cluster:
        for _ in range(2):
            assert (await cluster.ask(prompt=prompt)).status_code == 200
        page = (await cluster.pages())["worker 0"]

    found = {
        sample.name: sample.value
        for family in families(page)
        for sample in family.samples
        if sample.name.startswith("trinamo_engine_") and "state" not in sample.labels
    }
    assert found["trinamo_engine_prefix_hit_tokens_total"] > 0
    assert found["trinamo_engine_preemptions_total"] == 0
    assert found["trinamo_engine_paused_sequences"] == 0
    assert found["trinamo_engine_steps_total"] > 0
