"""What the shell offers for keys, values and settings, and what needs no extra."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.places import Place
from trinamo.cli.options import complete_override
from trinamo.cli.settings import complete_setting

WITHOUT_HTTPX = """\
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "httpx":
            raise ImportError("no httpx")
sys.meta_path.insert(0, Finder())
sys.argv = ["trinamo", "sim", "list"]
from trinamo.cli.main import main
main()
"""


def completed(place: Place, *words: str) -> list[str]:
    """What bash is offered for the last of the words."""
    line = ["trinamo", *words]
    done = subprocess.run(
        [Path(sys.executable).with_name("trinamo")],
        env={
            **place.environ,
            "_TRINAMO_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(line),
            "COMP_CWORD": str(len(line) - 1),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.stdout.split()


def test_configuration_keys_are_completed_and_then_what_they_may_be() -> None:
    assert "http.port=" in complete_override("http.po")
    assert complete_override("log.level=") == [
        f"log.level={each}" for each in ("debug", "info", "warning", "error")
    ]
    assert complete_override("http.reuse_port=t") == ["http.reuse_port=true"]
    assert complete_override("worker.status_port=") == ["worker.status_port=null"]
    assert complete_override("no.such=") == []
    assert "router.policy=" in complete_override("")


def test_settings_are_completed_with_what_they_are_about() -> None:
    found = dict(complete_setting("router.m"))

    assert set(found) == {"router.migrations_max", "router.migration_tokens_max"}
    assert all(found.values())


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("up", "--set", "log.form"), "log.format="),
        (("config", "set", "router.policy", "le"), "least_loaded"),
        (("config", "set", "log.acc"), "log.access"),
    ],
)
def test_the_shell_is_offered_them(tmp_path: Path, words: tuple[str, ...], offered: str) -> None:
    assert offered in completed(Place(tmp_path), *words)


def test_models_are_offered_as_nothing_while_no_cluster_runs(tmp_path: Path) -> None:
    assert completed(Place(tmp_path), "chat", "--model", "") == []


def test_the_list_of_scenarios_needs_no_extra(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HTTPX],
        env=Place(tmp_path).environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    assert done.returncode == 0, done.stderr
    assert "worker_dies" in done.stdout
