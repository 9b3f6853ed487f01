"""The names, types, labels and help of all metrics: what dashboards and alerts of others rely on.

A change of ours that changes `golden.txt` is one that operators meet: it goes into `changes/`, too.
`python -m tests.runtime.metrics.test_golden` writes the file anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import trio
from prometheus_client.parser import text_string_to_metric_families

from tests.runtime.small_cluster import open_small_cluster
from trinamo.cli.serve.output import show_losses
from trinamo.runtime.caller.migration import MigrationSeries
from trinamo.runtime.disaggregation.metrics import DecodeMetrics, PrefillMetrics
from trinamo.runtime.env import RealEnv
from trinamo.runtime.http.metrics import FrontendMetrics
from trinamo.runtime.kv.transfer.metrics import TransferMetrics
from trinamo.runtime.planes import TransferReport
from trinamo.runtime.protocol.disaggregation.decision import PrefillReason
from trinamo.runtime.protocol.transfer.description import Direction
from trinamo.runtime.weights.lender import WeightsMetrics
from trinamo.transports.sockets.certificates import CertificateSeries

GOLDEN = Path(__file__).with_name("golden.txt")


def lines_of(role: str, page: str) -> Iterator[str]:
    for each in text_string_to_metric_families(page):
        if not each.name.startswith("process_"):
            labels = sorted({name for sample in each.samples for name in sample.labels} - {"le"})
            yield f"{role}: {each.type} {each.name} {{{','.join(labels)}}} {each.documentation}"


async def described() -> str:
    """All families of a frontend that routes by `kv`, of its worker, and those that few have."""
    async with open_small_cluster(router__policy="kv") as cluster:
        assert (await cluster.ask(prompt="a prompt of several blocks " * 4)).status_code == 200
        assert (await cluster.ask(model="none")).status_code == 404
        with trio.fail_after(120):
            while "trinamo_kv_index_blocks{" not in (await cluster.pages())["frontend"]:
                await trio.sleep(0.05)
        await trio.sleep(1.1)
        pages = await cluster.pages()
    metrics = FrontendMetrics(RealEnv())
    weights = WeightsMetrics(metrics)
    weights.bytes.tally("lent").value += 1
    weights.failures.tally("disconnected").value += 1
    CertificateSeries(metrics, "http")
    show_losses(metrics)
    decode = DecodeMetrics(metrics, metrics.clock, "decode_first")
    decode.decided(PrefillReason.LONG_PROMPT)
    prefill = PrefillMetrics(metrics)
    with decode.under_way() as remote, prefill.working("decode_first"):
        remote.came(1)
    transfers = TransferMetrics(metrics)
    transfers.opened("tcp", is_open=True)
    transfers.started("tcp")
    transfers.done(
        TransferReport(
            backend="tcp",
            path="stream",
            direction=Direction.READ,
            block_count=1,
            byte_count=1,
            duration_s=0.1,
            is_verified=True,
        )
    )
    transfers.fell_back("tcp", "memory")
    transfers.usable("tcp", "a:1", is_usable=True)
    transfers.inquired("settled")
    migrations = MigrationSeries(metrics.now, metrics)
    migrations.ended(is_new=True, outcome="migrated", since=metrics.now())
    migrations.refused("spent")
    pages["others"] = metrics.render().decode()
    return "".join(
        f"{line}\n" for role, page in pages.items() for line in sorted(lines_of(role, page))
    )


async def test_names_types_labels_and_help_are_those_that_are_known() -> None:
    assert (await described()).splitlines() == GOLDEN.read_text("utf-8").splitlines()


if __name__ == "__main__":
    GOLDEN.write_text(trio.run(described), "utf-8")
