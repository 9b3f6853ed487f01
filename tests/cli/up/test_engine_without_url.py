"""`trinamo up --engine openai` without an upstream: refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.places import Place
from trinamo.cli.options import Sources
from trinamo.cli.up.plan import plan_cluster
from trinamo.runtime.errors import ConfigError


def test_it_is_told_by_a_setting_that_this_command_has(tmp_path: Path) -> None:
    """`--upstream` is an option of `trinamo worker` alone."""
    place = Place(tmp_path)
    done = place.run("up", "--engine", "openai", "--plain")

    assert done.returncode != 0
    assert "--set worker.upstream.url=http://" in done.stderr
    assert "--upstream" not in done.stderr
    assert "etcd" not in done.stdout + done.stderr
    assert place.leftovers == []


def test_the_plan_is_refused() -> None:
    sources = Sources().with_engine("openai", None)

    with pytest.raises(ConfigError, match=r"worker\.upstream\.url"):
        plan_cluster(sources, workers=1, frontends=1, prefills=0)
