"""The models of a process that asks workers: found in discovery, their answers migrated as configured."""

from __future__ import annotations

import math

import trio

from ...caller.migration import MigrationPolicy, MigrationSeries
from ...config.config import Config
from ...http.models.discovery import AWAY_S, watch_models
from ...http.models.models import ModelManager
from ..runtime import Runtime


async def follow_models(nursery: trio.Nursery, runtime: Runtime, manager: ModelManager) -> None:
    """Keep `manager` equal to the published cards, in `nursery`; returns once they are known."""
    metrics, section = manager.metrics, runtime.config.router
    migration = MigrationPolicy(
        series=MigrationSeries(metrics.now, metrics.registry),
        migrations_max=section.migrations_max,
        tokens_max=section.migration_tokens_max,
    )

    def tune(found: Config) -> None:
        """Requests that come from now on are replayed by the settings that are in force."""
        migration.migrations_max = found.router.migrations_max
        migration.tokens_max = found.router.migration_tokens_max

    runtime.live.listen(tune)
    # Whoever names the servers wants them back, however long that takes.
    away_s = math.inf if runtime.config.http.upstreams else AWAY_S
    await nursery.start(watch_models, runtime.control, runtime, manager, migration, away_s)
