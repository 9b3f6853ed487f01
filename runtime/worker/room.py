"""How much work may wait in a worker's engine before the next request is refused."""

from __future__ import annotations

from ..engines.generation import GenerationEngine
from ..errors import OverloadedError


def check_waiting_tokens(engine: GenerationEngine, waiting_tokens_max: int) -> None:
    """Raise `OverloadedError` while more than `waiting_tokens_max` tokens wait to be computed.

    What is admitted but has not reached the engine yet is not counted: `worker.requests_max`
    bounds it.
    """
    waiting = engine.statistics().waiting_tokens
    if waiting > waiting_tokens_max:
        raise OverloadedError(
            f"{waiting} prompt tokens wait to be computed, more than waiting_tokens_max"
            f" {waiting_tokens_max}",
            bound="waiting_tokens_max",
            value=waiting_tokens_max,
        )
