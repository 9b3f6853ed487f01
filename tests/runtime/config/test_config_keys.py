"""No key of the configuration is inert: the product reads each where it acts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from tests.sources import ROOT
from trinamo.runtime.config.config import Config
from trinamo.runtime.config.keys import config_fields

SOURCES = [
    path
    for folder in ("runtime", "transports", "src/trinamo/cli")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not path.name.startswith("config")
]
# Rules of the configuration itself, each with the test that shows what it changes.
RULES = {
    "control_plane.etcd.allow_plain_password": "test_a_password_leaves_this_machine_in_clear_only",
    "event_plane.nats.allow_plain_password": "test_a_password_leaves_this_machine_in_clear_only",
}


READ = re.compile(r"""\.(\w+)\b(?!\s*=[^=])|["'](\w+)["']""")


def inert(keys: Iterable[str], texts: Iterable[str]) -> set[str]:
    """Keys whose last name is read, as an attribute or by its text, less often than keys have it.

    The rule on dead names finds one that nothing reads at all; this finds that `tcp.ack_timeout_s` is
    read and `nats.ack_timeout_s` is not, unless another place reads the first as well.
    """
    reads = Counter(one or other for text in texts for one, other in READ.findall(text))
    names = Counter(key.rpartition(".")[2] for key in keys)
    return {key for key in keys if reads[key.rpartition(".")[2]] < names[key.rpartition(".")[2]]}


def test_every_key_is_read_where_it_acts() -> None:
    """A key that nothing reads goes, or gets what it promises."""
    keys = config_fields(Config).keys()
    found = inert(keys, (path.read_text("utf-8") for path in SOURCES))

    assert found - RULES.keys() == set()


def test_every_rule_has_its_test() -> None:
    folder = ROOT / "tests" / "runtime" / "config"
    text = "".join(path.read_text("utf-8") for path in folder.glob("test_*.py"))

    assert all(f"def {name}" in text for name in RULES.values())


def test_a_key_that_is_read_for_another_section_only_is_found() -> None:
    keys = ["tcp.timeout_s", "nats.timeout_s", "nats.port"]

    assert inert(keys, ["tcp.timeout_s + nats.timeout_s", "get(nats, 'port')"]) == set()
    assert inert(keys, ["tcp.timeout_s = nats.timeout_s"]) == {*keys}
    assert inert(keys, ["tcp.timeout_s; nats.port"]) == {*keys[:2]}
