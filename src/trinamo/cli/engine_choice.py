"""Which engine the workers run, and why, as a sentence.

Only looks: nothing is imported or loaded, so `up` and `doctor` can say it before any worker runs.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

import attrs

from trinamo.runtime.config import WorkerConfig
from trinamo.runtime.engines.model_file import find_model
from trinamo.runtime.errors import ConfigError

__all__ = ["EXTRA_COMMAND", "EXTRA_MODULES", "EngineChoice", "choose_engine"]

EXTRA_MODULES: Final = ("cyllama", "tokenizers", "jinja2", "gguf")
EXTRA_COMMAND: Final = "pip install 'trinamo[llamacpp]'"


@attrs.frozen
class EngineChoice:
    """`engine` is what to run; `reason` completes the sentence "engine X: …"."""

    engine: str
    reason: str


def choose_engine(config: WorkerConfig) -> EngineChoice:
    """Resolve `auto`; raises `ConfigError` if `llamacpp` was asked for by name and cannot run."""
    if config.engine in ("exact", "echo"):
        return EngineChoice(config.engine, "as configured")
    missing = [name for name in EXTRA_MODULES if find_spec(name) is None]
    problem = f"its extra is not installed; run `{EXTRA_COMMAND}`" if missing else ""
    if not problem:
        try:
            path = find_model(config.model_path)
        except ConfigError as error:
            problem = error.message
        else:
            return EngineChoice("llamacpp", f"its extra is installed and its model is at {path}")
    if config.engine == "llamacpp":
        raise ConfigError(f"the engine llamacpp cannot run: {problem}")
    return EngineChoice("exact", f"llamacpp cannot run: {problem}")
