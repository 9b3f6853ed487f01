"""What a request to stop does in the start of a process, then, and again."""

from __future__ import annotations

import signal

import pytest
import trio
import trio.testing

from trinamo.runtime.process.stopping import StopRequest, stopped_by_signals


async def test_a_request_in_the_start_ends_the_start_alone() -> None:
    stop = StopRequest()
    with stop.everything:
        with stop.starting():
            assert stop.request() == "ending the start"
            await trio.sleep(60)
        await stop.wait()
        await trio.lowlevel.checkpoint()

    assert not stop.everything.cancelled_caught


async def test_a_start_that_nobody_wants_any_more_does_not_begin() -> None:
    stop = StopRequest()
    with stop.everything:
        with stop.starting():
            pass
        stop.request()
        with stop.starting() as begun:
            await trio.lowlevel.checkpoint()
            raise AssertionError(f"it went on: {begun}")

    assert stop.is_requested


async def test_the_second_request_ends_everything() -> None:
    stop = StopRequest()
    with stop.everything:
        with stop.starting():
            pass
        assert stop.request() == "shutting down in order"
        await stop.wait()
        assert stop.request() == "ending at once"
        await trio.sleep_forever()

    assert stop.everything.cancelled_caught


async def test_a_signal_is_a_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trinamo")
    async with stopped_by_signals() as stop:
        with stop.starting():
            pass
        signal.raise_signal(signal.SIGTERM)
        with trio.fail_after(120):
            await stop.wait()

    assert "SIGTERM: shutting down in order" in caplog.text


async def test_after_the_second_signal_the_third_one_kills() -> None:
    """A thread of an engine cannot be cancelled; the process must not wait for it for good."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    async with stopped_by_signals() as stop:
        with stop.starting():
            pass
        with trio.CancelScope(shield=True):
            signal.raise_signal(signal.SIGTERM)
            await stop.wait()
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
            signal.raise_signal(signal.SIGTERM)
            with trio.fail_after(120):
                while not stop.everything.cancel_called:
                    await trio.lowlevel.checkpoint()
            assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_sigterm_hurries_nobody_who_is_supervised(number: signal.Signals) -> None:
    """An operator restarts one process of `trinamo up`, which ends all of them meanwhile."""
    is_whole = False
    async with stopped_by_signals(is_supervised=True) as stop:
        with stop.starting():
            pass
        signal.raise_signal(signal.SIGTERM)
        await stop.wait()
        signal.raise_signal(number)
        await trio.testing.wait_all_tasks_blocked()
        await trio.lowlevel.checkpoint()
        is_whole = True

    assert is_whole is (number == signal.SIGTERM)


async def test_a_thread_that_signals_do_not_reach_is_told_what_to_give_instead() -> None:
    async def serve() -> None:
        async with stopped_by_signals():
            pass

    with pytest.raises(RuntimeError, match=r"stop = trinamo\.StopRequest"):
        await trio.to_thread.run_sync(trio.run, serve)
