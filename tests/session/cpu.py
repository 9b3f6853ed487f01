"""What the tests cost in CPU-seconds, told at the end of a run with `--cpu`, and how long files took.

Seconds of a clock say how busy a machine was; those of a processor say what a test makes it do. A
test's are those of its process, of the processes that it started and saw the end of, and of those
that were forked for it (`forks.py`). A fixture is counted for the test that opens or closes it; what
is left of a process is its start and the collection.
"""

from __future__ import annotations

import heapq
import json
import resource
from collections.abc import Generator
from contextlib import suppress
from typing import Any, Final

import pytest

from tests.session import forks
from tests.session.lanes import COSTS

SHOWN: Final = 30
OURS: Final = "cpu_s"
LONG_S: Final = 2.0
"""What is quicker is not worth a line."""


def pytest_addoption(parser: pytest.Parser) -> None:
    # Both folders of tests have this, and a run may read one of them or both.
    with suppress(ValueError):
        parser.addoption(
            "--cpu",
            action="store_true",
            help=f"show the {SHOWN} files and tests that cost most CPU",
        )
        parser.addoption(
            "--costs",
            action="store_true",
            help="write down how long each file took, for the next deal",
        )


def pytest_configure(config: pytest.Config) -> None:
    options = {name: bool(config.getoption(name, default=False)) for name in ("cpu", "costs")}
    if any(options.values()) and not config.pluginmanager.has_plugin("cpu"):
        config.pluginmanager.register(Costs(**options), "cpu")


def used_s() -> float:
    """CPU-seconds of this process and of what it started, as far as that has ended."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    usages = [resource.getrusage(kind) for kind in kinds]
    return sum(each.ru_utime + each.ru_stime for each in usages) + forks.cpu_s()


class Costs:
    def __init__(self, *, cpu: bool, costs: bool) -> None:
        self._is_shown, self._is_written = cpu, costs
        self._seen_s = 0.0
        self._rest_s = 0.0
        self._tests: dict[str, float] = {}
        self._took_s: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        now_s = used_s()
        self._rest_s += now_s - self._seen_s
        self._seen_s = now_s
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now_s = used_s()
        setattr(report, OURS, now_s - self._seen_s)
        self._seen_s = now_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before_s = self._tests.get(report.nodeid, 0.0)
        self._tests[report.nodeid] = before_s + getattr(report, OURS, 0.0)
        file = report.nodeid.partition("::")[0]
        self._took_s[file] = self._took_s.get(file, 0.0) + report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.pluginmanager.has_plugin("dsession"):
            # The lanes are children of this process, and say themselves what they used.
            usage = resource.getrusage(resource.RUSAGE_SELF)
            self._rest_s += usage.ru_utime + usage.ru_stime
        else:
            self._rest_s += used_s() - self._seen_s
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[OURS] = self._rest_s

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._rest_s += getattr(node, "workeroutput", {}).get(OURS, 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._is_shown:
            self._show(terminalreporter)
        if self._is_written:
            took_s = {file: round(s) for file, s in sorted(self._took_s.items()) if s >= LONG_S}
            COSTS.write_text(json.dumps(took_s, indent=2) + "\n", "utf-8")

    def _show(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        files: dict[str, float] = {}
        for nodeid, cost_s in self._tests.items():
            file = nodeid.partition("::")[0]
            files[file] = files.get(file, 0.0) + cost_s
        whole_s = sum(files.values()) + self._rest_s
        terminalreporter.section("CPU-seconds")
        write(f"{whole_s:9.1f} in all; {self._rest_s:.1f} of them starts and collections")
        for title, costs in (("files", files), ("tests", self._tests)):
            write(f"the dearest {title}:")
            for name in heapq.nlargest(SHOWN, costs, key=lambda name: costs[name]):
                write(f"{costs[name]:9.1f} {name}")
