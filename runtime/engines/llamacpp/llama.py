"""llama.cpp as cyllama brings it: the module, a model, a context, and what goes wrong with them."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import ConfigError


def import_llama() -> ModuleType:
    """The extension module; `ConfigError` if the extra is not installed."""
    try:
        # By name, as a type checker cannot look into the extension module.
        llama = importlib.import_module("cyllama.llama.llama_cpp")
        importlib.import_module("jinja2")
        importlib.import_module("llguidance")
    except ImportError as error:
        raise ConfigError(
            "the llamacpp engine needs an extra that is not installed"
            f" ({error}): pip install 'trinamo[llamacpp]'"
        ) from error
    return llama


def load_model(llama: Any, path: Path) -> Any:
    """The model at `path`, for the CPU; `ConfigError` if it cannot be used."""
    llama.disable_logging()
    llama.ggml_backend_load_all()
    parameters = llama.LlamaModelParams()
    parameters.n_gpu_layers = 0
    try:
        model = _model_type(llama)(str(path), parameters)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"llama.cpp cannot load {path}: {error}") from error
    kind = model.meta_val_str("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConfigError(
            f"{path} has a {kind!r} vocabulary; only byte-level BPE ('gpt2') is supported"
        )
    return model


def _model_type(llama: Any) -> Any:
    class Model(llama.LlamaModel):  # type: ignore[misc]
        @property
        def n_vocab(self) -> int:
            """`LlamaContext.get_logits_ith` of cyllama 0.2.18 asks for it, and nobody has it."""
            return int(self.get_vocab().n_vocab)

    return Model


def make_context(llama: Any, model: Any, parameters: Any) -> Any:
    """Raises `ConfigError` if there is no memory for it."""
    try:
        return llama.LlamaContext(model, parameters)
    except (MemoryError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"llama.cpp cannot make a context of {parameters.n_ctx} tokens and"
            f" {parameters.n_seq_max} sequences: {error}"
        ) from error
