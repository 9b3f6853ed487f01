"""What `trinamo doctor` says about the models of a cluster that runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import trio

from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.planes import Entry
from trinamo.runtime.protocol.discovery.model_cards import MODEL_PREFIX
from trinamo.transports.assembly.planes import open_control_plane

from ..running.locating import Target, somebody_listens
from ..status.models import look_at_models
from .finding import Finding, Verdict

__all__ = ["discovery_findings", "model_findings"]

TIMEOUT_S: Final = 5.0
TOLD_MAX: Final = 8


async def discovery_findings(target: Target) -> list[Finding]:
    """Look into etcd, if there is one; nothing if it does not answer, which is told elsewhere."""
    section = target.config.control_plane
    if section.backend != "etcd":
        return []
    endpoints = list(section.etcd.endpoints)
    if not any([await somebody_listens(each) for each in endpoints]):
        return []
    with trio.move_on_after(TIMEOUT_S):
        try:
            async with open_control_plane(section.etcd, endpoints) as control:
                return model_findings((await control.range(MODEL_PREFIX)).entries)
        except TrinamoError:
            return []
    return []


def model_findings(entries: Sequence[Entry]) -> list[Finding]:
    """One finding for all models, and one for each card or alias that frontends refuse."""
    models, refused = look_at_models(entries)
    names = ", ".join(
        each.name + (f" (also {', '.join(each.aliases)})" if each.aliases else "")
        for each in models[:TOLD_MAX]
    )
    more = f" and {len(models) - TOLD_MAX} more" if len(models) > TOLD_MAX else ""
    found = [Finding("models", Verdict.GOOD, f"{names}{more}")] if models else []
    remedy = "give the workers of one model one engine, one bound of context and one endpoint"
    found += [Finding("models", Verdict.WARNING, why, remedy) for why in refused[:TOLD_MAX]]
    if len(refused) > TOLD_MAX:
        text = f"{len(refused) - TOLD_MAX} more cards or aliases are refused"
        found.append(Finding("models", Verdict.WARNING, text, "trinamo status --json"))
    return found
