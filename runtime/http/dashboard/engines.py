"""A look at engines that run in the frontend's own process: nobody is asked, and nobody can be away."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from ...engines.generation import GenerationEngine, read_statistics
from ..survey.frontends import FrontendLook
from ..survey.instances import InstanceLook
from ..survey.listing import ModelLook
from ..survey.overview import FrontendView
from ..survey.survey import Survey
from .gathering import Look


class EnginesLook:
    """Looks at `engines`, each as an instance that is called as its model."""

    def __init__(
        self, view: Callable[[], FrontendView], engines: Sequence[GenerationEngine]
    ) -> None:
        self._view, self._engines = view, engines

    async def look(self, url: str, status_url: str) -> Look:
        """See `Looks`."""
        view = self._view()
        survey = Survey(etcd="", cluster=None, frontend=None)
        own = FrontendLook("this process", 0, url, status_url, view.status, view=view, is_own=True)
        survey.frontends.append(own)
        for engine in self._engines:
            survey.instances.append(_instance(engine))
            survey.models.append(
                ModelLook(
                    engine.info.model,
                    "in this process",
                    engine.info.engine,
                    engine.info.context_tokens_max,
                    instances=1,
                    registered=1,
                )
            )
        return Look(survey)


def _instance(engine: GenerationEngine) -> InstanceLook:
    info, statistics = engine.info, read_statistics(engine)
    return InstanceLook(
        endpoint="in this process",
        id=info.model,
        lease_id="",
        incarnation=1,
        is_draining=False,
        transports={},
        metadata={"model": info.model, "engine": info.engine},
        health={
            "status": "ready",
            "active": statistics.running + statistics.waiting,
            "engines": {info.model: attrs.asdict(statistics)},
            "blocks": {"used": statistics.blocks_used, "total": info.block_count},
        },
        name=info.model,
    )
