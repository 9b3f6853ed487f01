"""Which engine a worker runs, and how it is opened. Imports an engine only once it is chosen."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import attrs

from trinamo.runtime.config.models import is_own_engine
from trinamo.runtime.config.worker import WorkerConfig
from trinamo.runtime.engines.threads import busy_cores, count_cores, threads_of_step
from trinamo.runtime.errors import ConfigError

if TYPE_CHECKING:
    from trinamo.runtime.engines import GenerationEngine


_EXTRA_MODULES: Final = ("cyllama", "jinja2", "llguidance")
_BUSY_TOLD: Final = 0.5
"""From so many cores on that others keep busy, it is reported."""


@attrs.frozen
class EngineChoice:
    """An engine and the sentence that says why it."""

    engine: str
    why: str


def choose_engine(section: WorkerConfig) -> EngineChoice:
    """Resolve `auto`: llamacpp where its extra and model file are there, else exact.

    Raises `ConfigError` for llamacpp by name without the extra, or without the model file, and for
    openai without a URL.
    """
    if section.engine == "openai" and section.upstream.url is None:
        raise ConfigError(
            "worker.upstream.url is null; say where the server is, such as"
            " --set worker.upstream.url=http://host:8000/v1"
        )
    if section.engine not in ("auto", "llamacpp"):
        return EngineChoice(section.engine, "as configured")
    missing = [name for name in _EXTRA_MODULES if importlib.util.find_spec(name) is None]
    if missing and section.engine == "llamacpp":
        raise ConfigError(
            f"worker.engine is llamacpp, and its extra is not installed ({', '.join(missing)}"
            " missing); pip install 'trinamo[llamacpp]', or choose --engine exact"
        )
    if missing:
        return EngineChoice(
            "exact",
            f"the extra llamacpp is not installed ({', '.join(missing)} missing); "
            "pip install 'trinamo[llamacpp]'",
        )
    from trinamo.runtime.engines.llamacpp.model_file import find_model

    try:
        path = find_model(section.model_path)
    except ConfigError as error:
        if section.model_path or section.engine == "llamacpp":
            raise
        return EngineChoice("exact", f"there is no model file: {error}")
    return EngineChoice("llamacpp", f"its extra is installed and the model is {path}")


def check_engines(section: WorkerConfig) -> str:
    """Import the engines of all models and look at them, without opening one; returns a line.

    Raises `ConfigError` for one that a worker could not open, as far as that is seen without.
    """
    told = []
    for each in section.by_model():
        choice = choose_engine(each)
        told.append(f"engine {choice.engine}: {choice.why}")
        if is_own_engine(choice.engine):
            from trinamo.runtime.engines.own.loading import load_engine

            definition = load_engine(choice.engine)
            definition.check(each.engine_args)
            told[-1] = f"engine {choice.engine} is {definition.name}"
            if not each.model_name and definition.is_opened_to_be_known:
                told[-1] = f"engine {choice.engine} is there; opened, it says what it serves"
    return "; ".join(told)


def share_cores(threads: int | str, engines: Sequence[str], *, workers: int = 1) -> tuple[int, str]:
    """The threads of a step, where so many workers of one machine each have these engines, and why.

    If that is for the machine to say, and one of them is llama.cpp, measures how busy it is.
    """
    sharing = workers * engines.count("llamacpp")
    cores = count_cores()
    busy = 0.0
    if not isinstance(threads, int):
        busy = busy_cores() if sharing else busy
        threads = threads_of_step(cores, busy=busy, sharing=sharing)
    why = f"{threads} thread{'s'[: threads > 1]}, for {cores.usable} core{'s'[: cores.usable > 1]}"
    if busy >= _BUSY_TOLD:
        why += f", while other processes keep {busy:.1f} of {cores.scheduled} busy (worker.threads)"
    return threads, why


@asynccontextmanager
async def open_engine(
    section: WorkerConfig, engine: str, *, threads: int
) -> AsyncIterator[GenerationEngine]:
    """The engine by name, with the bounds of the configuration, and so many threads a step.

    Raises `ConfigError` if it cannot be opened with them.
    """
    async with AsyncExitStack() as stack:
        try:
            opened = await stack.enter_async_context(_opener(section, engine, threads))
        except (ValueError, MemoryError) as error:
            raise ConfigError(
                f"engine {engine} cannot be opened with the bounds under `worker`: {error}"
            ) from error
        yield opened


def _opener(
    section: WorkerConfig, engine: str, threads: int
) -> AbstractAsyncContextManager[GenerationEngine]:
    waiting = _given(waiting_max=section.waiting_max)
    context = _given(context_tokens_max=section.context_tokens_max)
    bounds = context | waiting
    bounds |= _given(
        running_max=section.running_max,
        step_tokens_max=section.step_tokens_max,
        chunk_tokens_max=section.chunk_tokens_max,
    )
    blocks, block_tokens = section.kv_blocks, section.kv_block_tokens
    if is_own_engine(engine):
        from trinamo.runtime.engines.own.loading import load_engine

        return load_engine(engine).open(
            model=section.model_name, arguments=section.engine_args, **context
        )
    match engine:
        case "echo":
            from trinamo.runtime.engines import open_echo_engine

            return open_echo_engine(model=section.model_name or "echo", **context)
        case "exact":
            from trinamo.runtime.engines.exact.engine import open_exact_engine
            from trinamo.runtime.kv.memory import KvLayout

            return open_exact_engine(
                model=section.model_name or "exact",
                block_tokens=block_tokens,
                layout=KvLayout(section.kv_layout),
                **_given(block_count=blocks),
                **bounds,
            )
        case "openai":
            from trinamo.transports.openai.engine import open_upstream_engine

            return open_upstream_engine(
                section.upstream,
                model=section.model_name,
                **_given(running_max=section.running_max),
                **context,
            )
        case "mocker":
            from trinamo.runtime.engines.mocker.engine import MockerOptions, open_mocker_engine

            # It has upstream's names for the same bounds.
            given = _given(
                num_gpu_blocks=blocks,
                max_num_seqs=section.running_max,
                max_num_batched_tokens=section.step_tokens_max,
            )
            options = MockerOptions(block_size=block_tokens, **given)
            model = section.model_name or "mocker"
            return open_mocker_engine(options, model=model, **context, **waiting)
        case _:
            from trinamo.runtime.engines.llamacpp.engine import open_llamacpp_engine
            from trinamo.runtime.engines.llamacpp.model_file import MODEL_NAME
            from trinamo.runtime.kv.memory import KvLayout

            return open_llamacpp_engine(
                section.model_path,
                model=section.model_name or MODEL_NAME,
                threads=threads,
                layout=KvLayout(section.kv_layout),
                closes_objects=section.closed_objects,
                embeds=section.embeddings,
                **_given(kv_tokens=blocks and blocks * block_tokens),
                **bounds,
            )


def _given(**bounds: int | None) -> dict[str, Any]:
    """The bounds that are configured; the engine knows best about the others."""
    return {name: value for name, value in bounds.items() if value is not None}
