"""What every run of the tests has in common, whichever folder it reads.

Examples are the same in every run, `make check` has what `make test` has no time for, and the end of
a run states what was skipped. The servers that tests share are in `tests/conftest.py`.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Generator, Iterable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

SKIPPED = "Skipped: "
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "test")

# No example is judged by its time: the machine may be busy.
settings.register_profile(
    "search", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=False
)
settings.register_profile(
    "test",
    settings.get_profile("search"),
    derandomize=True,
    database=None,
    max_examples=40,
)
settings.load_profile(PROFILE)
if PROFILE == "test":
    # Hypothesis takes some values from the constants of all local modules imported so far. Examples
    # would depend on which tests the same process ran before, and on every edit of the product.
    assert callable(providers._get_local_constants)
    providers._get_local_constants = lambda: providers._local_constants

for name in ("COLUMNS", "LINES"):
    # pytest-xdist sets a width, which commands would take for that of a terminal.
    os.environ.pop(name, None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as `check` what is outside of `testpaths`, and what needs a transfer library."""
    quick = tuple(f"{config.rootpath / each}{os.sep}" for each in config.getini("testpaths"))
    for item in items:
        is_quick = str(item.path).startswith(quick)
        # Parameters such as `nixl-tcp`: both libraries need a package of the system.
        if not is_quick or any(name in item.nodeid for name in ("nixl", "mooncake")):
            item.add_marker(pytest.mark.check)


def pytest_collection_finish() -> None:
    """Keep Python's collector out of what was collected, which stays to the end.

    Going through it again and again took a sixth of the processor time of the tests of HTTP.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape what is no UTF-8 in captured output: pytest-xdist could not send it."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """State what was skipped, why, and the command that provides what was missing."""
    reports = terminalreporter.stats.get("skipped", [])
    if text := skipped_text(each.longrepr[2] for each in reports):
        terminalreporter.write_line(text, yellow=True)


def skipped_text(reasons: Iterable[str]) -> str:
    """`3 skipped: 2 × no Chromium (…), no openssl (…)`; empty if nothing was skipped."""
    counts = Counter(reason.removeprefix(SKIPPED) for reason in reasons)
    if not counts:
        return ""
    parts = (f"{n} × {reason}" if n > 1 else reason for reason, n in counts.most_common())
    return f"{counts.total()} skipped: {', '.join(parts)}"
