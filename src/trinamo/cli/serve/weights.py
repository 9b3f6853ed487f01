"""The model file of a worker: where it is missing, a peer may have it."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import trio

from trinamo.runtime.config.config import Config
from trinamo.runtime.config.worker import WorkerConfig
from trinamo.runtime.engines import GenerationEngine
from trinamo.runtime.env import Env
from trinamo.runtime.errors import ConfigError, TrinamoError
from trinamo.runtime.process.transports import Transports
from trinamo.runtime.process.worker.weights import WorkerWeights, take_weights
from trinamo.runtime.weights.lender import HeldFile, WeightsMetrics
from trinamo.runtime.weights.taker import DownloadProgress, MissingFile

_log = logging.getLogger("trinamo.weights")
TELL_S: Final = 1.0


async def take_missing_weights(
    config: Config, env: Env, transports: Transports, metrics: WeightsMetrics
) -> None:
    """Take the files of llamacpp models that are missing here and that a peer offers.

    An engine that is `auto` looks once, and does without. One that is llamacpp by name waits for an
    offer for `weights.patience_s`. What goes wrong is logged: the engine says what it misses.
    Raises `ConfigError` for what nobody but the configuration can mend.
    """
    plane = config.control_plane
    if not config.weights.enabled or plane.backend != "etcd" or plane.embedded:
        # In memory, and with a store of its own, a process has no peers.
        return
    for section in config.worker.by_model():
        missing = _missing(section)
        if missing is None:
            continue
        wanted, target = missing
        patience_s = 0.0 if section.engine == "auto" else config.weights.patience_s
        try:
            await take_weights(
                config,
                env,
                transports,
                wanted,
                target,
                metrics=metrics,
                patience_s=patience_s,
                report=_telling(wanted.model),
                who=f"{socket.gethostname()[:64]}, pid {os.getpid()}",
            )
        except ConfigError:
            raise
        except TrinamoError as error:
            _log.warning("the weights of %s were not taken from a peer: %s", wanted.model, error)


def _missing(section: WorkerConfig) -> tuple[MissingFile, Path] | None:
    """What a worker of this section needs and has not; None if nothing."""
    if section.engine not in ("auto", "llamacpp") or importlib.util.find_spec("cyllama") is None:
        return None
    from trinamo.runtime.engines.llamacpp.model_file import FILE_SHA256, MODEL_NAME, missing_model

    target = missing_model(section.model_path)
    if target is None:
        return None
    # Without a path the model is the one that `make model` fetches, whatever it is called here.
    is_named = section.model_path is not None or "TRINAMO_MODEL" in os.environ
    known = None if is_named else FILE_SHA256
    name = section.model_name or MODEL_NAME
    return MissingFile(name, section.namespace, section.model_sha256 or known), target


def held_weights(
    sections: Sequence[tuple[WorkerConfig, GenerationEngine]], metrics: WeightsMetrics
) -> WorkerWeights:
    """The files that engines of ours were opened from."""
    files: list[HeldFile] = []
    for section, engine in sections:
        if engine.info.engine == "llamacpp":
            from trinamo.runtime.engines.llamacpp.model_file import find_model

            files.append(HeldFile(find_model(section.model_path), engine.info.model))
    return WorkerWeights(files, metrics)


def _telling(model: str) -> Callable[[DownloadProgress], None]:
    """A line of the log now and then, and one at the end."""
    told_at = -TELL_S
    began_at = trio.current_time()
    began: int | None = None

    def tell(progress: DownloadProgress) -> None:
        nonlocal told_at, began
        now = trio.current_time()
        began = progress.done if began is None else began
        if now < told_at + TELL_S and progress.done < progress.total:
            return
        told_at = now
        rate = (progress.done - began) / max(now - began_at, 1e-3)
        _log.info(
            "weights of %s: %d of %d MB (%d %%), %d MB/s, from %s",
            model,
            progress.done // 1_000_000,
            progress.total // 1_000_000,
            progress.done * 100 // progress.total,
            rate // 1_000_000,
            progress.holder,
        )

    return tell
