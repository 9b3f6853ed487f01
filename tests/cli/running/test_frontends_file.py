"""The file by which frontends that `trinamo up` has not started are found."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from trinamo.cli.running.frontends_file import FrontendsFile, find_frontends, find_neighbours
from trinamo.runtime.config.config import Config, load_config
from trinamo.transports.assembly.run_file import ProcessEntry


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run folder of the test's own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_frontends_of_another_build_are_found() -> None:
    """They have written more, of themselves and of each process."""
    with FrontendsFile.kept() as file:
        file.publish("http://127.0.0.1:1", Config(), [ProcessEntry("frontend", os.getpid())])
        written = json.loads(file.path.read_text())
        written["processes"][0]["later"] = written["later"] = 1
        file.path.write_text(json.dumps(written))

        assert find_frontends() == [file]


@pytest.mark.parametrize(
    "other",
    [
        {"control_plane.etcd.key_prefix": "team-b/"},
        {"control_plane.etcd.endpoints": "127.0.0.1:1"},
        {"http.upstreams": "http://127.0.0.1:2"},
    ],
)
def test_frontends_of_another_cluster_are_no_neighbours(other: dict[str, str]) -> None:
    """Clusters that share an etcd differ in their prefixes, and upstreams have no cluster."""
    own = load_config(environ={}, overrides={"control_plane.etcd.key_prefix": "team-a/"})
    others = load_config(environ={}, overrides={"control_plane.etcd.key_prefix": "team-a/"} | other)
    with FrontendsFile.kept() as file:
        for config, count in ((own, 1), (others, 0)):
            file.publish("http://127.0.0.1:1", config, [ProcessEntry("frontend", os.getpid())])

            assert len(find_neighbours(own).frontends) == count


def test_a_file_that_cannot_be_read_is_left_to_the_process_that_it_is_called_after() -> None:
    with FrontendsFile.kept() as file:
        file.publish("http://127.0.0.1:1", Config(), [])
        file.path.write_text("{}")
        gone = file.path.with_name(f"none{file.path.suffix}")
        gone.write_text("{}")

        assert find_frontends() == []
        assert file.path.exists()
        assert not gone.exists()
