"""Several models of one worker, as `worker.models` says them."""

from __future__ import annotations

import pytest

from trinamo.runtime.config.config import load_config
from trinamo.runtime.config.worker import WorkerConfig
from trinamo.runtime.errors import ConfigError


def worker(models: str, **more: str) -> WorkerConfig:
    overrides = {"worker.models": models, **{f"worker.{k}": v for k, v in more.items()}}
    return load_config(environ={}, overrides=overrides).worker


def test_each_line_is_the_section_of_a_worker_of_that_model_alone() -> None:
    first, second = worker(
        "org/Chat=exact;alias=a;alias=b, v=2=echo;endpoint=old;path=m.gguf", kv_blocks="64"
    ).by_model()
    assert (first.model_name, first.engine, first.model_aliases) == (
        "org/Chat",
        "exact",
        ("a", "b"),
    )
    assert (first.endpoint, first.kv_blocks, first.models) == ("generate-org-chat", 64, ())
    assert (second.model_name, second.engine) == ("v=2", "echo")
    assert (second.endpoint, second.model_path) == ("old", "m.gguf")


def test_a_worker_of_one_model_is_its_own_section() -> None:
    section = load_config(environ={}, overrides={"worker.model_aliases": "a,b"}).worker
    assert section.by_model() == (section,)
    assert section.model_aliases == ("a", "b")


@pytest.mark.parametrize(
    ("models", "why"),
    [
        ("exact", "is no model"),
        ("=exact", "is no model"),
        ("a=vllm", "'vllm' is no engine"),
        ("a=exact,a=echo", "one name"),
        ("a b=exact,a-b=echo", "one endpoint"),
        ("a=exact;port=1", "'port=1' is not"),
        ("a=exact;path=x;path=y", "'path=y' is not"),
        ("a=exact;endpoint=No", "endpoint"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(models: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        worker(models)


def test_the_keys_of_one_model_and_the_lines_of_several_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="for one"):
        worker("a=exact", model_name="b")
