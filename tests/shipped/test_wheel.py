"""What is built is what is in the tree: every module through the links, data files, `py.typed`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.sources import ROOT

FOLDERS = ("runtime", "transports", "sim")
DATA = {
    "trinamo/__init__.pyi",
    "trinamo/py.typed",
    *(f"trinamo/runtime/config/presets/{name}.yaml" for name in ("small", "medium", "large")),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel made from the sdist, out of a clean copy: setuptools reuses a stale `build/`."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in (*FOLDERS, "src"):
        unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = out.glob("*.whl")
    return zipfile.ZipFile(path)


def files_in_the_tree() -> set[str]:
    found = {
        f"trinamo/{path.relative_to(ROOT).as_posix()}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }
    front = ROOT / "src" / "trinamo"
    rooms = [path for name in ("cli", "conformance") for path in (front / name).rglob("*.py")]
    for path in [*front.glob("*.py"), *rooms]:
        found.add(f"trinamo/{path.relative_to(front).as_posix()}")
    return found


def test_the_wheel_has_every_module_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}

    assert {name for name in inside if name.endswith(".py")} == files_in_the_tree()
    patterns = (
        "transports/*/*.pyi",
        "runtime/view/files/*",
        "sim/catalogue/*.toml",
        "sim/report/*.html",
        "sim/report/*.css",
        "sim/report/*.js",
    )
    data = {f"trinamo/{path.relative_to(ROOT)}" for each in patterns for path in ROOT.glob(each)}
    front = ROOT / "src" / "trinamo"
    data |= {f"trinamo/{path.relative_to(front)}" for path in front.glob("cli/sim/template/*")}
    assert {name for name in inside if not name.endswith(".py")} == DATA | data


def test_the_wheel_takes_one_top_level_name(wheel: zipfile.ZipFile) -> None:
    tops = {Path(name).parts[0] for name in wheel.namelist()}

    assert {top for top in tops if not top.endswith(".dist-info")} == {"trinamo"}


def test_the_wheel_has_its_licence_and_its_command(wheel: zipfile.ZipFile) -> None:
    names = {Path(name).name: name for name in wheel.namelist() if ".dist-info/" in name}

    metadata = Parser().parsestr(wheel.read(names["METADATA"]).decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "LICENSE" in names
    assert "trinamo = trinamo.cli.main:main" in wheel.read(names["entry_points.txt"]).decode()


def test_the_links_point_at_the_root_folders() -> None:
    """A checkout without symbolic links would build a wheel that is nearly empty."""
    for name in FOLDERS:
        link = ROOT / "src" / "trinamo" / name

        assert link.is_symlink()
        assert link.resolve() == ROOT / name
