"""No key of the configuration is inert: the product reads each where it acts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.config_reads import fields_read
from tests.sources import ROOT
from trinamo.runtime.config.config import Config
from trinamo.runtime.config.keys import Section, config_fields
from trinamo.transports.mooncake.options import MooncakeOptions
from trinamo.transports.nixl.options import NixlOptions
from trinamo.transports.tcp.sockets import TcpOptions

SOURCES = [
    path
    for folder in ("runtime", "transports", "src/trinamo/cli")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not path.name.startswith("config")
]
# What these sections say is read of a class that has more; each name of theirs must be.
ROOTS: Mapping[str, Any] = {
    "": Config,
    "data_plane.tcp.": TcpOptions,
    "data_plane.nixl.": NixlOptions,
    "data_plane.mooncake.": MooncakeOptions,
}
# Rules of the configuration itself, each with the test that shows what it changes.
RULES = {
    "control_plane.etcd.allow_plain_password": "test_a_password_leaves_this_machine_in_clear_only",
    "event_plane.nats.allow_plain_password": "test_a_password_leaves_this_machine_in_clear_only",
}


@pytest.mark.slow
def test_every_key_is_read_where_it_acts() -> None:
    """A key that nothing reads goes, or gets what it promises."""
    inert = config_fields(Config).keys() - fields_read(ROOTS, SOURCES) - RULES.keys()

    assert inert == set()


def test_every_rule_has_its_test() -> None:
    folder = ROOT / "tests" / "runtime" / "config"
    text = "".join(path.read_text("utf-8") for path in folder.glob("test_*.py"))

    assert all(f"def {name}" in text for name in RULES.values())


class Inner(Section, frozen=True, kw_only=True):
    """For the tests of the search."""

    used: int = 1
    inert: int = 2


class Outer(Section, frozen=True, kw_only=True):
    """For the tests of the search."""

    inner: Inner = Inner()
    used: int = 3
    other: int = 4


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f(c: Outer): return c.inner.used", {"inner.used", "inner"}),
        ("def f(c: Outer):\n    i, n = c.inner, 1\n    g(i.used)", {"inner.used", "inner"}),
        ("class A:\n    def __init__(self, o: Outer | None): self._o = o\n\n    def f(self):\n        return self._o.inner.used", {"inner.used", "inner"}),
        ("def f(i: 'Inner'): return getattr(i, 'used')", {"inner.used"}),
        ("def f(i: Inner): return _given(i, 'used', 'nothing')", {"inner.used"}),
        ("def f(c: Outer):\n    i = structs.replace(c.inner, inert=3)\n    return i.used",
         {"inner.used", "inner"}),
        # The same name of another section, of nothing known, or written and never read.
        ("def f(c: Outer): return c.used", {"used"}),
        ("def f(c): return c.used", set()),
        ("def f(i: Inner):\n    i = g()\n    return i.used", set()),
        ("Inner(used=1)", set()),
    ],
)  # fmt: skip
def test_the_search_tells_sections_apart(text: str, found: set[str], tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(text)

    assert fields_read({"": Outer}, [path]) == found
