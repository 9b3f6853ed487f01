"""The pytest plugin: `@pytest.mark.sim` plays a test in many simulated runs and explains a failure.

    @pytest.mark.sim(seeds=200)
    async def test_no_value_is_lost(world, network): ...

A marked test asks for `choices`, `world` or `network`, and gets others for each seed; an `async` one
is the run's main function, whatever other plugin there is for those. Its other fixtures are made once,
and must not be async. Without the mark the three are plain fixtures, for one run, made as the fixture
`sim_options` says, which anybody may override:

    @pytest.fixture
    def sim_options(): return {"policy": "step", "ambient": "raise"}

A test that Hypothesis feeds with `trinamo.sim.strategies.choices` needs no mark: what fails is made small and
saved all the same.

pytest loads this module wherever trinamo is installed, so it imports nothing of it until a test asks.
Read next: `sim/own/marked.py` and `sim/own/drawn.py`, which do the work.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from .sim import Choices, Fault, Network, World
    from .sim.own.marked import MarkedTest


PARTS: Final = ("choices", "world", "network")
SEEDS: Final = 100
"""How many runs a marked test plays that does not say."""
TEST: pytest.StashKey[Any] = pytest.StashKey()
"""The test's own function: plugins for async tests put a runner in its place."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of `pytest` for simulated runs."""
    group = parser.getgroup("sim", "simulated runs (trinamo)")
    group.addoption("--sim-seeds", type=int, metavar="N", help="play tests marked sim with N seeds")
    group.addoption(
        "--sim-seed", type=int, metavar="N", help="play tests marked sim with seed N only"
    )
    group.addoption(
        "--sim-replay",
        type=Path,
        metavar="FILE",
        help="play the test of this failure file once more",
    )
    group.addoption(
        "--sim-html", type=Path, metavar="DIR", help="write pages and failure files of runs there"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    config.addinivalue_line(
        "markers",
        f"sim(seeds={SEEDS}, policy='batch', ambient=None, faults=[], shrink=True): play the test in so"
        " many simulated runs, each with a choices, world and network of its own",
    )


@pytest.fixture
def choices(request: pytest.FixtureRequest) -> Choices:
    """The decisions of one simulated run: those of `--sim-seed`, or of seed 0."""
    from .sim import SeedChoices

    return SeedChoices(request.config.getoption("sim_seed") or 0)


@pytest.fixture
def sim_options() -> dict[str, Any]:
    """How `world` and `network` are made: `policy`, `ambient`, and a plan of `faults`; override it."""
    return {}


@pytest.fixture
def faults(sim_options: dict[str, Any]) -> list[Fault]:
    """The plan of faults of one run. Who asks for it hands it to `arm`, with what boots a host again."""
    return list(sim_options.get("faults", []))


@pytest.fixture
def world(choices: Choices, sim_options: dict[str, Any]) -> World:
    """A simulated world that has not run."""
    from .sim import World

    return World(choices, **{key: sim_options[key] for key in sim_options if key != "faults"})


@pytest.fixture
def network(world: World, sim_options: dict[str, Any], request: pytest.FixtureRequest) -> Network:
    """The network of `world`, where nothing is broken but what the plan of faults says."""
    from .sim import Network, arm

    network = Network(world)
    faults = sim_options.get("faults")
    if faults and "faults" not in request.node._fixtureinfo.argnames:  # noqa: SLF001 -- the test's own
        world.on_start.append(lambda: arm(world, network, faults))
    return network


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Keep what other plugins wrap."""
    if isinstance(item, pytest.Function) and item.get_closest_marker("sim") is not None:
        item.stash[TEST] = item.obj


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Play a marked test in all its runs; others are not ours."""
    mark = pyfuncitem.get_closest_marker("sim")
    if mark is None:
        return _feed(pyfuncitem)
    from .sim.own.marked import MarkedTest, Options

    config = pyfuncitem.config
    seeds = mark.kwargs.get("seeds", SEEDS)
    for option in ("sim_seeds", "sim_seed"):
        given = config.getoption(option)
        if given is not None:
            seeds = given if option == "sim_seeds" else [given]
    test = MarkedTest(
        pyfuncitem.nodeid,
        pyfuncitem.stash[TEST],
        _arguments(pyfuncitem, (*PARTS, *({"faults"} & mark.kwargs.keys()))),
        Options(
            seeds=range(seeds) if isinstance(seeds, int) else seeds,
            out=_folder(config),
            plays_saved=config.getoption("sim_seed") is None,
            **{name: value for name, value in mark.kwargs.items() if name != "seeds"},
        ),
    )
    if config.getoption("sim_replay") is not None:
        return _replay(pyfuncitem, test)
    found = test.search()
    if found:
        pytest.fail(found, pytrace=False)
    return True


def _feed(item: pytest.Function) -> bool | None:
    """Have what Hypothesis finds with drawn decisions made small; it plays the test itself."""
    handle = getattr(item.obj, "hypothesis", None)
    if handle is None or "trinamo.sim.strategies" not in sys.modules:
        return None
    from .sim.own.drawn import DrawnTest
    from .sim.own.marked import Options

    function = getattr(handle.inner_test, "fed", handle.inner_test)
    # All that Hypothesis passes on; it takes what it draws out of the signature.
    given = [*inspect.signature(getattr(item.obj, "__func__", item.obj)).parameters]
    fixed = _arguments(item, ())
    if item.instance is not None:
        fixed[given[0]] = item.instance
    test = DrawnTest(item.nodeid, function, fixed, Options(seeds=(), out=_folder(item.config)), {})
    if item.config.getoption("sim_replay") is not None:
        return _replay(item, test)
    handle.inner_test = feed = test.feeding(given)
    vars(feed)["fed"] = function
    return None


def _replay(item: pytest.Function, test: MarkedTest) -> bool:
    from .sim.explore.failure import BadFailureFile

    replayed: Any = item.config.getoption("sim_replay")
    # Of what the test itself raises; a failure without any traceback must not hide its last frame, too.
    __tracebackhide__ = True
    try:
        other = test.replay(replayed)
    except BadFailureFile as error:
        pytest.fail(f"--sim-replay: {error}", pytrace=False)
    if other is not None:
        pytest.skip(f"{replayed} is of {other}")
    return True


def _arguments(item: pytest.Function, parts: tuple[str, ...]) -> dict[str, Any]:
    """What the test takes besides the parts of a run."""
    names = item._fixtureinfo.argnames  # noqa: SLF001 -- as every plugin that calls a test does
    found = {name: item.funcargs[name] for name in names if name not in parts}
    for name, value in found.items():
        if type(value).__name__ == "TrioFixture":
            pytest.fail(f"a test marked sim cannot take the async fixture {name}", pytrace=False)
    return found


def _folder(config: pytest.Config) -> Path:
    """Where pages and failure files go: the asked-for folder, or pytest's cache."""
    asked: Path | None = config.getoption("sim_html")
    if asked is not None:
        return asked
    if config.pluginmanager.has_plugin("cacheprovider") and config.cache is not None:
        return config.cache.mkdir("trinamo-sim")
    return config.rootpath / ".trinamo-sim"
