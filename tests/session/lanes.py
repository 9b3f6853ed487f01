"""How `make test` spreads the tests over processes of pytest-xdist: each has its files before it collects.

A file stays in one process, since its tests may share a cluster or a browser, and no other process
reads it: collecting all of them costs more than most tests do. Files are dealt by what they took
when that was last written down (`costs.json`, see `cpu.py`), dear ones first, the same for every run
of as many processes. Those that start clusters are dealt to half of the processes: a test's cluster
is six more, and a machine that has four of them answers nobody in time. What shares nothing (`SPREAD`) is collected by all, comes last, and fills the
gaps that the deal leaves: a file of properties, or one simulated scenario, at a time.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

COSTS: Final = Path(__file__).with_name("costs.json")
UNKNOWN_S: Final = 1.0
"""What a file is thought to take that nobody has measured, or that was quicker."""
TOGETHER: Final = ("tests/house/",)
"""Folders whose files stay in one process as one: they parse the same sources."""
SPREAD: Final = ("tests/sim/scenario/test_catalogue.py", "properties/")
"""Files that any process may play."""
ONE_BY_ONE: Final = SPREAD[:1]
"""Those of them whose tests stand each for itself."""
CROWDS: Final = "mark.services"
"""What says in a file that its tests start processes."""
DEALT, LANE = "dealt", "lane"


def unit_of(nodeid: str) -> str:
    """What stays in one process with a test."""
    file = nodeid.partition("::")[0]
    return nodeid if file.endswith(ONE_BY_ONE) else file


def deal(
    files: Iterable[str], lanes: int, costs: Mapping[str, float], crowded: Container[str] = ()
) -> list[list[str]]:
    """The files of each lane, in the order in which it plays them; spread ones are none's.

    `crowded` ones come first, and in one lane of two only.
    """
    hands: dict[str, list[str]] = {}
    for file in sorted(files):
        if not file.startswith(SPREAD):
            hand = next((folder for folder in TOGETHER if file.startswith(folder)), file)
            hands.setdefault(hand, []).append(file)

    def cost_of(hand: str) -> float:
        return sum(costs.get(file, UNKNOWN_S) for file in hands[hand])

    dealt: list[list[str]] = [[] for _ in range(lanes)]
    loads = [0.0] * lanes
    for hand in sorted(hands, key=lambda hand: (hand not in crowded, -cost_of(hand), hand)):
        lane = loads.index(min(loads[: (lanes + 1) // 2] if hand in crowded else loads))
        dealt[lane] += hands[hand]
        loads[lane] += cost_of(hand)
    return dealt


def test_files(config: pytest.Config) -> Iterator[str]:
    """Those below the folders that were named, by their paths from the root."""
    for argument in config.args:
        place = Path(config.invocation_params.dir, argument.partition("::")[0])
        for pattern in config.getini("python_files"):
            for path in place.rglob(pattern):
                if path.is_relative_to(config.rootpath):
                    yield path.relative_to(config.rootpath).as_posix()


def costs() -> dict[str, float]:
    """Seconds by file, of those that took long."""
    found: dict[str, float] = json.loads(COSTS.read_text("utf-8"))
    return found


# --- in the process that deals ------------------------------------------------------------------------


class Dealer:
    """Tells each lane its files; a lane that takes the place of one that died gets that one's."""

    def __init__(self, hands: Sequence[Sequence[str]]) -> None:
        self._waiting = [list(hand) for hand in reversed(hands)]
        self._every = sorted(file for hand in hands for file in hand)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: WorkerController) -> None:
        node.workerinput[DEALT] = self._every
        node.workerinput[LANE] = self._waiting.pop()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: WorkerController) -> None:
        self._waiting.append(node.workerinput[LANE])


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Deal; and in a lane, shorten its folder by a word: a socket's path has no room for more."""
    if hasattr(config, "workerinput"):
        folder = Path(config.option.basetemp)
        config.option.basetemp = str(folder.with_name(folder.name.removeprefix("popen-gw")))
    elif is_ours(config) and not config.pluginmanager.has_plugin("dealer"):
        files = set(test_files(config))
        crowded = {file for file in files if CROWDS in (config.rootpath / file).read_text("utf-8")}
        hands = deal(files, len(config.getoption("tx") or ()), costs(), crowded)
        config.pluginmanager.register(Dealer(hands), "dealer")


def is_ours(config: pytest.Config) -> bool:
    """Whether there are lanes, and no other manner of spreading was asked for with `--dist`."""
    return bool(config.getoption("tx", default=None)) and config.getoption("dist") == "load"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Units of ours, each to a lane that has collected it."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        """xdist's takes it that every lane has collected the same."""

        def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
            self.registered_collections[node] = list(collection)

        def schedule(self) -> None:
            if self.collection is None:
                collections = self.registered_collections.values()
                tests = list(dict.fromkeys(test for each in collections for test in each))
                for test in tests:
                    self.workqueue.setdefault(unit_of(test), {})[test] = False
                # What it is told by each lane in turn is what the last one has.
                session: Any = self.config.pluginmanager.getplugin("session")
                session.testscollected = len(tests)
                self.collection: list[str] | None = tests
            for node in self.nodes:
                self._reschedule(node)

        def _reschedule(self, node: WorkerController) -> None:
            has = set(self.registered_collections.get(node, ()))
            # A lane plays a test once it knows the one after it.
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) <= 2:
                mine = [unit for unit, tests in self.workqueue.items() if not has.isdisjoint(tests)]
                if not mine:
                    node.shutdown()
                    return
                self._assign(node, min(mine, key=lambda unit: unit.startswith(SPREAD)))

        def _assign(self, node: WorkerController, unit: str) -> None:
            tests = self.workqueue.pop(unit)
            self.assigned_work[node][unit] = tests
            places = {test: n for n, test in enumerate(self.registered_collections[node])}
            node.send_runtest_some([places[test] for test, is_done in tests.items() if not is_done])

        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    return Scheduling(config, log) if is_ours(config) else None


# --- in a lane ----------------------------------------------------------------------------------------


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the files of other lanes alone."""
    given = getattr(config, "workerinput", {})
    if DEALT not in given or not collection_path.is_relative_to(config.rootpath):
        return None
    file = collection_path.relative_to(config.rootpath).as_posix()
    return True if file in given[DEALT] and file not in given[LANE] else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a lane the tests run in the order of the deal, else in that in which they stand."""
    hand = getattr(config, "workerinput", {}).get(LANE, ())
    places = {file: place for place, file in enumerate(hand)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


def pytest_collection_finish() -> None:
    """What was collected stays to the end, so the collector of garbage need not go through it again.

    It took a sixth of the processor time of the tests of HTTP.
    """
    gc.collect()
    gc.freeze()
