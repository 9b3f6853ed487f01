"""What `trinamo doctor` says about the models of a cluster that runs, and their files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import trio

from trinamo.runtime.config.http import HttpConfig
from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.protocol.undecodable import UNSIGNED_REMEDY
from trinamo.runtime.view.facts import WeightsRow, weights_rows
from trinamo.runtime.view.survey import Survey

from ..running.locating import Target, somebody_listens
from ..status.asking import survey_cluster
from .finding import Finding, FindingVerdict

TIMEOUT_S: Final = 6.0
TOLD_MAX: Final = 8


async def discovery_findings(target: Target, url: str = "", key: str = "") -> list[Finding]:
    """Look into the cluster, if there is one; nothing if etcd is away, which is told elsewhere."""
    section = target.config.control_plane
    if section.backend != "etcd":
        return []
    if not url and not any([await somebody_listens(each) for each in section.etcd.endpoints]):
        return []
    with trio.move_on_after(TIMEOUT_S):
        try:
            survey = await survey_cluster(target, url=url, key=key)
        except TrinamoError as error:
            return [Finding("cluster", FindingVerdict.WARNING, error.message)]
        return [
            *reach_findings(survey),
            *cluster_findings(survey),
            *shedding_findings(survey, target.config.http),
        ]
    return [
        Finding("cluster", FindingVerdict.WARNING, f"did not answer whole within {TIMEOUT_S:g} s")
    ]


def reach_findings(survey: Survey) -> Iterator[Finding]:
    """Who is registered and cannot be reached from here, or does not answer; else that all do."""
    remedy = (
        "see that the process runs and nothing between drops packets; where it is told at another"
        " address than it has, set data_plane.tcp.advertise_host there"
    )
    for why in survey.away[:TOLD_MAX]:
        yield Finding(
            "reach", FindingVerdict.WARNING, why, remedy if "cannot be reached" in why else ""
        )
    for look in survey.frontends:
        if look.wants_key and look.view is None:
            text = f"{look.url} wants a key (401), so what it knows is not looked at"
            yield Finding("reach", FindingVerdict.NOTE, text, "trinamo doctor --key-env NAME")
    if not survey.away:
        text = f"{len(survey.instances)} instances and {len(survey.frontends)} frontends answer"
        yield Finding("reach", FindingVerdict.GOOD, f"{text}, where they are registered")


def cluster_findings(survey: Survey) -> Iterator[Finding]:
    """One finding for all models, one for each entry that frontends refuse, one for each file."""
    models = survey.models
    names = ", ".join(
        each.name + (f" (also {', '.join(each.aliases)})" if each.aliases else "")
        for each in models[:TOLD_MAX]
    )
    if models:
        more = f" and {len(models) - TOLD_MAX} more" if len(models) > TOLD_MAX else ""
        yield Finding("models", FindingVerdict.GOOD, f"{names}{more}")
    remedy = "give the workers of one model one engine, one bound of context and one endpoint"
    for why in survey.refused[:TOLD_MAX]:
        entry, is_unsigned, _ = why.partition(f": {UNSIGNED_REMEDY}")
        if is_unsigned:
            yield Finding("signatures", FindingVerdict.WARNING, entry, UNSIGNED_REMEDY)
        else:
            yield Finding("models", FindingVerdict.WARNING, why, remedy)
    if len(survey.refused) > TOLD_MAX:
        text = f"{len(survey.refused) - TOLD_MAX} more cards or aliases are refused"
        yield Finding("models", FindingVerdict.WARNING, text, "trinamo status --json")
    yield from _weights(list(weights_rows((each.id, each.health) for each in survey.instances)))


def shedding_findings(survey: Survey, section: HttpConfig) -> Iterator[Finding]:
    """Workers that report no load, where frontends refuse requests by what workers report."""
    silent = [
        each.id
        for each in survey.instances
        if "model" in each.metadata and "reports" not in each.metadata
    ]
    if section.sheds_load and silent:
        text = (
            f"http.busy_blocks and http.busy_waiting_tokens count for nothing with {len(silent)}"
            f" workers that report no load: {', '.join(silent[:TOLD_MAX])}"
        )
        remedy = "give the workers these keys too, and start them again"
        yield Finding("shedding", FindingVerdict.WARNING, text, remedy)


def _weights(rows: Sequence[WeightsRow]) -> Iterator[Finding]:
    """Each file once, with its holders and who takes it from them."""
    files = dict.fromkeys((row.sha256, row.model, row.byte_count) for row in rows)
    for sha256, model, byte_count in list(files)[:TOLD_MAX]:
        holders = [row for row in rows if row.sha256 == sha256]
        text = (
            f"{model} ({byte_count // 1_000_000} MB, sha256 {sha256[:16]}…) is held by"
            f" {len(holders)} workers; one without the file takes it from them"
        )
        takers = [taker for row in holders for taker in row.takers]
        if takers:
            text += f", as do now {'; '.join(takers[:TOLD_MAX])}"
        yield Finding("weights", FindingVerdict.GOOD, text)
