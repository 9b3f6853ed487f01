"""Engines: what turns a request into tokens, and the step loop they share.

Reading order: `generation` (what an engine is to a worker), `echo` (the smallest one), `step`
(what a model has to offer), `host` (the step loop over it: `scheduler`, `sequence`, `answer`),
`exact` and `llamacpp` (models), `text` (bytes to text, stop strings).

This package imports neither numpy nor an extra, so that a worker can call `limit_threads` first;
take `open_exact_engine` from `exact` and `open_llamacpp_engine` from `llamacpp`.
"""

from __future__ import annotations

from .echo import open_echo_engine
from .generation import EngineInfo, EngineStatistics, GenerationEngine
from .threads import limit_threads

__all__ = [
    "EngineInfo",
    "EngineStatistics",
    "GenerationEngine",
    "limit_threads",
    "open_echo_engine",
]
