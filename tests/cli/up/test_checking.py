"""An engine that cannot be one is told before anything is started for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.places import Place
from trinamo.cli.up import plan
from trinamo.runtime.config.worker import WorkerConfig
from trinamo.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print('loading'); import no_such_thing", "does not import: ModuleNotFoundError"),
        ("async def other(request, context): yield 'x'", "has no engine; its engines: none"),
        ("async def engine(request, context): return 'x'", "engine engine is no async generator"),
        ("import os; os.abort()", "the process that did was killed by SIGABRT"),
    ],
)
def test_up_starts_nothing_for_a_broken_engine(code: str, words: str, tmp_path: Path) -> None:
    place = Place(tmp_path)
    (tmp_path / "mine.py").write_text(code)

    done = place.run("up", "--port", "0", "--engine", "./mine.py:engine")

    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1]
    assert done.stdout == ""
    assert place.leftovers == []


def test_one_of_several_models_is_checked_as_well(tmp_path: Path) -> None:
    place = Place(tmp_path)
    done = place.run("up", "--set", "worker.models=first=echo,second=./none.py:engine")

    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no file none.py" in done.stderr


def test_an_engine_is_checked_by_itself_without_being_opened(tmp_path: Path) -> None:
    place = Place(tmp_path)
    (tmp_path / "mine.py").write_text(
        "class Engine:\n"
        "    def __init__(self):\n"
        "        raise SystemError('opened')\n"
        "    async def answer(self, request, context):\n"
        "        yield 'x'\n"
    )

    done = place.run("worker", "--check-engine", "--engine", "./mine.py:Engine")

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "engine ./mine.py:Engine is Engine\n"


def test_an_import_that_never_ends_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("import time; time.sleep(3600)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "CHECK_TIMEOUT_S", 0.1)
    section = WorkerConfig(engine="./mine.py:engine")

    with pytest.raises(ConfigError, match=r"mine.py:engine is not imported within 0.1 s"):
        plan.check_own_engines(section, Place(tmp_path).environ)
