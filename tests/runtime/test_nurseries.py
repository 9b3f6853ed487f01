"""One error leaves our nurseries, as itself; tests of the whole runtime are in `tests/runtime/process/test_lifespan.py`."""

# ruff: noqa: PT012 -- what leaves a nursery is the subject, so it is inside `raises`.

from __future__ import annotations

import logging
import traceback

import pytest
import trio

from trinamo.runtime.errors import DisconnectedError, UnavailableError
from trinamo.runtime.nurseries import open_nursery, single


async def fail(error: BaseException, after: int = 0) -> None:
    """Raise, after some rounds of the scheduler, cancelled or not."""
    with trio.CancelScope(shield=True):
        for _ in range(after):
            await trio.lowlevel.checkpoint()
    raise error


async def test_an_error_of_the_body_crosses_nested_nurseries_unchanged() -> None:
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        async with open_nursery() as outer, open_nursery() as inner:
            outer.start_soon(trio.sleep_forever)
            inner.start_soon(trio.sleep_forever)
            raise error
    assert caught.value is error
    assert error.__context__ is None
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)] == [
        test_an_error_of_the_body_crosses_nested_nurseries_unchanged.__name__
    ]


async def test_the_context_an_error_had_stays_its_context() -> None:
    with pytest.raises(KeyError) as caught:
        async with open_nursery() as nursery, open_nursery():
            try:
                int("x")
            except ValueError:
                nursery.start_soon(trio.sleep_forever)
                raise KeyError("mine")  # noqa: B904 -- the implicit context is what is tested
    assert isinstance(caught.value.__context__, ValueError)


async def test_an_error_of_a_task_leaves_as_itself() -> None:
    error = UnavailableError("nobody")
    with pytest.raises(UnavailableError) as caught:
        async with open_nursery() as outer:
            async with open_nursery() as inner:
                inner.start_soon(fail, error)
            outer.start_soon(trio.sleep_forever)
    assert caught.value is error


async def test_the_first_in_time_leaves_and_names_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level(logging.WARNING, "trinamo.nurseries"),
        pytest.raises(DisconnectedError) as caught,
    ):
        async with open_nursery() as nursery:
            nursery.start_soon(fail, DisconnectedError("gone"))
            await fail(ValueError("while cancelled"), 5)
    assert caught.value.__notes__ == ["also raised: ValueError: while cancelled"]
    assert len(caplog.records) == 1


async def test_a_consequence_stands_back_behind_its_cause() -> None:
    with pytest.raises(DisconnectedError) as caught:
        async with open_nursery() as nursery:
            nursery.start_soon(fail, DisconnectedError("gone"), 3)
            await fail(trio.ClosedResourceError("the other one has closed it"))
    assert not hasattr(caught.value, "__notes__")


async def test_cancellation_from_outside_stays_cancellation() -> None:
    with trio.CancelScope() as scope:
        async with open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_an_error_while_being_cancelled_from_outside_leaves_as_itself() -> None:
    with pytest.raises(KeyError), trio.CancelScope() as scope:
        async with open_nursery() as nursery:
            nursery.start_soon(fail, KeyError("cleanup"), 5)
            scope.cancel()
            await trio.sleep_forever()


async def test_a_group_of_the_body_stays_that_group() -> None:
    group = ExceptionGroup("mine", [KeyError("a"), ValueError("b")])
    with pytest.raises(ExceptionGroup) as caught:
        async with open_nursery(), open_nursery():
            raise group
    assert caught.value is group


def test_what_is_no_exception_comes_first() -> None:
    group = BaseExceptionGroup("", [ValueError(), BaseExceptionGroup("", [KeyboardInterrupt()])])
    assert isinstance(single(group), KeyboardInterrupt)


def test_a_group_of_consequences_is_told_by_one_of_them() -> None:
    broken = trio.BrokenResourceError()
    assert single(ExceptionGroup("", [ExceptionGroup("", [broken])])) is broken
    assert single(broken) is broken
