"""How `make test` spreads the tests over processes of pytest-xdist: by file, long ones first.

A file stays in one process, since its tests may share a cluster or a browser. What starts
processes of its own comes first, while there is much else to do beside its waiting; simulated
scenarios, which only compute and stand each for itself, come last and fill the gaps one by one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

FIRST: Final = tuple(
    f"tests/{folder}/"
    for folder in (
        "soak",
        "machines",
        "cluster",
        "outages",
        "attack",
        "cli",
        "transports",
        "shipped",
        "conformance",
    )
)
SPREAD: Final = ("test_catalogue.py",)
"""Files whose tests share nothing and are spread one by one."""


def rank(file: str) -> int:
    """When a file is begun, the least first."""
    if file.endswith(SPREAD):
        return len(FIRST) + 1
    places = (place for place, folder in enumerate(FIRST) if file.startswith(folder))
    return next(places, len(FIRST))


def unit_of(nodeid: str) -> str:
    """What stays in one process with a test."""
    file = nodeid.partition("::")[0]
    return nodeid if file.endswith(SPREAD) else file


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Shorten the folder of a process by a word: a socket's path has no room for more."""
    if hasattr(config, "workerinput"):
        folder = Path(config.option.basetemp)
        config.option.basetemp = str(folder.with_name(folder.name.removeprefix("popen-gw")))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without other processes the tests run in the order in which they stand."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: rank(item.nodeid.partition("::")[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Units of ours, in the order given, unless another manner was asked for with `--dist`."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    if config.getoption("dist") != "load":
        return None
    config.option.loadscopereorder = False
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = unit_of
    return scheduler
