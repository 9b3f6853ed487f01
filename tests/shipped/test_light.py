"""The distribution without extras: the simulator, its command line and the pytest plugin, and nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.sources import ROOT

HANGS_S = 300
CLUSTER = {
    *(
        "cryptography",
        "google",
        "grpc",
        "h11",
        "h2",
        "httptools",
        "hypercorn",
        "nats",
        "numpy",
        "prometheus_client",
    ),
    *("starlette", "trio_asyncio", "yaml"),
}
"""Modules that the extra `cluster` brings."""
PACKAGES_MAX = 17
"""With trinamo itself, and without pip."""


def ran(*command: str | Path, cwd: Path, code: int = 0) -> str:
    """What the command said; it may not see this checkout."""
    surroundings = {
        name: value
        for name, value in os.environ.items()
        if name not in {"PYTHONPATH", "PYTEST_ADDOPTS", "VIRTUAL_ENV"}
    }
    done = subprocess.run(
        [str(each) for each in command],
        cwd=cwd,
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of a new environment that has what `pip install` of the wheel brings, no extra."""
    folder = tmp_path_factory.mktemp("light")
    ran(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    commands = folder / "venv" / "bin"
    pip = (commands / "python", "-m", "pip", "--quiet", "--disable-pip-version-check")
    build = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    ran(sys.executable, "-m", "pip", "--quiet", *build, ROOT, cwd=folder)
    [wheel] = folder.glob("*.whl")
    assert zipfile.is_zipfile(wheel)
    ran(*pip, "install", wheel, cwd=folder)
    return commands


@pytest.mark.check
def test_few_packages_come_and_none_of_the_cluster_s(environment: Path, tmp_path: Path) -> None:
    told = ran(environment / "python", "-m", "pip", "list", "--format", "json", cwd=tmp_path)

    names = {each["name"].lower() for each in json.loads(told.splitlines()[0])}
    names -= {"pip", "setuptools", "wheel"}
    assert len(names) <= PACKAGES_MAX, names
    assert names.isdisjoint({"grpcio", "numpy", "nats-py", "hypercorn", "starlette", "pyyaml"})


@pytest.mark.check
def test_a_stranger_makes_a_project_searches_it_and_finds_its_bug_with_pytest(
    environment: Path, tmp_path: Path
) -> None:
    trinamo = environment / "trinamo"
    ran(environment / "python", "-m", "pip", "--quiet", "install", "pytest", cwd=tmp_path)
    ran(trinamo, "sim", "new", "protocol", cwd=tmp_path)
    project = tmp_path / "protocol"
    source = project / "protocol.py"
    # As the template's README has it.
    told = source.read_text(encoding="utf-8")
    source.write_text(
        told.replace('if request["id"] not in self.seen:', "if True:"), encoding="utf-8"
    )

    searched = ran(
        *(trinamo, "sim", "swarm", "scenario.py", "--seeds", "0..200", "--out", "found"),
        cwd=project,
        code=1,
    )
    replay = re.search(r"trinamo (sim replay found/\S+\.json)", searched)
    assert replay is not None, searched
    assert "broken" in ran(trinamo, *replay[1].split(), cwd=project, code=1)

    tested = ran(environment / "python", "-m", "pytest", "-q", cwd=project, code=1)
    assert "trinamo sim replay failures/" in tested, tested


@pytest.mark.check
def test_what_needs_the_cluster_says_what_brings_it(environment: Path, tmp_path: Path) -> None:
    for command in (("up",), ("doctor",), ("sim", "run", "worker_dies")):
        told = ran(environment / "trinamo", *command, cwd=tmp_path, code=2)
        assert told == "trinamo: this needs the extra cluster; pip install 'trinamo[cluster]'\n"

    told = ran(environment / "python", "-c", "from trinamo import Runtime", cwd=tmp_path, code=1)
    assert "pip install 'trinamo[cluster]'" in told


def test_the_simulator_imports_no_package_of_the_cluster() -> None:
    code = """
import sys
import trinamo.cli.main, trinamo.cli.sim.swarm, trinamo.sim.own.marked, trinamo.sim.report.document
print(*sorted({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names))
"""
    surroundings = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}
    told = subprocess.run(
        [sys.executable, "-c", code],
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=True,
    )

    assert set(told.stdout.split()) & CLUSTER == set()
    assert {"trio", "typer"} <= set(told.stdout.split())
