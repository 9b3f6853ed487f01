"""What becomes of a test's report, and of what a test that failed left open.

The traceback of a failure holds its frames, and they hold sockets, files and generators that nobody
closed. Python frees them during some later test, where a warning is an error: one failure became
many. So they are freed as soon as the report is written, and what they say then is not heard.
"""

from __future__ import annotations

import gc
import sys
import traceback
import warnings
from collections.abc import Generator, Iterator

import pytest

from tests.session.needs import Skipped


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A report crosses processes as UTF-8: a character that is none is told by its number."""
    if call.excinfo is not None:
        _tell_why_skipped(call.excinfo.value)
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    if report.failed and call.excinfo is not None and not item.config.getoption("usepdb"):
        if report.when == "teardown" and isinstance(item, pytest.Function):
            item.funcargs.clear()  # what fixtures made; pytest forgets it a moment later
        _free(call.excinfo.value)
    return report


def _tell_why_skipped(raised: BaseException) -> None:
    """A skip inside a test of trio is raised anew, and without its reason, by pytest-trio."""
    if isinstance(raised, Skipped) and not raised.msg:
        every = _all_of(raised, set())
        raised.msg = next((e.msg for e in every if isinstance(e, Skipped) and e.msg), "")


def _free(failure: BaseException) -> None:
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for each in _all_of(failure, set()):
                traceback.clear_frames(each.__traceback__)
                for frame, _ in traceback.walk_tb(each.__traceback__):
                    _ = frame.f_locals  # before 3.13 a copy that is cleared when it is read anew
            gc.collect()
            gc.collect()  # what the first set free may have held more
    finally:
        sys.unraisablehook = hook


def _all_of(failure: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    """The failure, what it came from, and the members of groups."""
    if failure is None or id(failure) in seen:
        return
    seen.add(id(failure))
    yield failure
    members = failure.exceptions if isinstance(failure, BaseExceptionGroup) else ()
    for each in (failure.__cause__, failure.__context__, *members):
        yield from _all_of(each, seen)
