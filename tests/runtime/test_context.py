from __future__ import annotations

import itertools

import pytest
import trio
import trio.testing

from trinamo.runtime.context import Context, Reason, State


def test_a_context_is_born_live_without_a_reason() -> None:
    context = Context("r1")
    assert (context.state, context.is_stopped, context.is_killed) == (State.LIVE, False, False)
    assert context.reason is None
    assert repr(context) == "<Context r1 LIVE>"


async def test_stop_asks_and_leaves_the_scope_alone() -> None:
    context = Context("r1")
    context.stop()
    assert (context.state, context.reason) == (State.STOPPED, Reason.STOP_REQUESTED)
    assert context.is_stopped
    assert not context.is_killed
    assert not context.scope.cancel_called


def test_kill_cancels_the_scope_and_counts_as_stopped() -> None:
    context = Context("r1")
    context.kill(Reason.CLIENT_DISCONNECT)
    assert context.is_stopped
    assert context.is_killed
    assert context.scope.cancel_called
    assert context.reason is Reason.CLIENT_DISCONNECT


@pytest.mark.parametrize("steps", list(itertools.product(["stop", "kill"], repeat=4)))
def test_the_state_never_goes_down_and_every_state_is_told_once(steps: tuple[str, ...]) -> None:
    context, told = Context("r1"), list[State]()
    context.on_change(told.append)
    for step in steps:
        before = context.state
        getattr(context, step)()
        assert context.state >= before
    assert told == sorted(set(told))
    assert (State.KILLED in told) is ("kill" in steps)


def test_the_first_reason_of_each_state_stays_and_the_kill_s_wins() -> None:
    context = Context("r1")
    context.stop(Reason.DEADLINE)
    context.stop(Reason.FRONTEND_SHUTDOWN)
    assert context.stop_reason is Reason.DEADLINE
    context.kill(Reason.WORKER_SHUTDOWN)
    context.kill(Reason.PROTOCOL_ERROR)
    context.stop(Reason.FRONTEND_SHUTDOWN)
    assert (context.stop_reason, context.kill_reason) == (Reason.DEADLINE, Reason.WORKER_SHUTDOWN)
    assert context.reason is Reason.WORKER_SHUTDOWN


def test_children_are_told_first_in_the_order_they_were_linked() -> None:
    told: list[str] = []
    parent = Context("p")
    children = [Context(name, parent=parent) for name in "ab"]
    for context in (parent, *children):
        context.on_change(lambda state, name=context.id: told.append(f"{name} {state.name}"))  # type: ignore[misc]
    parent.stop(Reason.DEADLINE)
    parent.kill(Reason.CLIENT_DISCONNECT)
    assert told == [
        *("a STOPPED", "b STOPPED", "p STOPPED"),
        *("a KILLED", "b KILLED", "p KILLED"),
    ]
    assert [c.reason for c in children] == [Reason.CLIENT_DISCONNECT] * 2


def test_a_child_does_not_tell_its_parent_or_its_sibling() -> None:
    parent = Context("p")
    a, b = Context("a", parent=parent), Context("b", parent=parent)
    a.kill()
    assert (parent.state, b.state) == (State.LIVE, State.LIVE)


@pytest.mark.parametrize("state", [State.STOPPED, State.KILLED])
async def test_a_child_linked_late_inherits_the_state_and_its_reason_at_once(state: State) -> None:
    parent = Context("p")
    (parent.stop if state is State.STOPPED else parent.kill)(Reason.FRONTEND_SHUTDOWN)
    child = Context("c", parent=parent)
    assert (child.state, child.reason) == (state, Reason.FRONTEND_SHUTDOWN)
    assert child.scope.cancel_called is (state is State.KILLED)


def test_a_killed_child_is_not_downgraded_by_its_parent_s_stop() -> None:
    parent = Context("p")
    child = Context("c", parent=parent)
    child.kill(Reason.DEADLINE)
    parent.stop()
    assert (child.state, child.reason) == (State.KILLED, Reason.DEADLINE)


def test_a_finished_child_unlinks_itself() -> None:
    parent = Context("p")
    with Context("c", parent=parent) as child:
        assert parent.child_count == 1
    assert parent.child_count == 0
    child.close()
    parent.kill()
    assert child.state is State.LIVE


def test_a_listener_that_comes_late_is_told_at_once_and_one_that_left_is_not() -> None:
    context, told = Context("r1"), list[State]()
    context.stop()
    context.on_change(told.append)
    assert told == [State.STOPPED]
    context.off_change(told.append)
    context.off_change(told.append)
    context.kill()
    assert told == [State.STOPPED]


def test_a_listener_may_leave_while_listeners_are_told() -> None:
    context, told = Context("r1"), list[str]()

    def once(_: State) -> None:
        context.off_change(once)
        told.append("once")

    context.on_change(once)
    context.on_change(lambda _: told.append("always"))
    context.stop()
    context.kill()
    assert told == ["once", "always", "always"]


async def test_kill_wakes_a_handler_asleep_in_its_scope() -> None:
    context = Context("r1")
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def handler() -> None:
            with context.scope:
                await trio.sleep_forever()

        await trio.testing.wait_all_tasks_blocked()
        context.kill()
    assert context.scope.cancelled_caught


async def test_stopped_is_awaitable_also_afterwards() -> None:
    context = Context("r1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(context.wait_stopped)
        await trio.testing.wait_all_tasks_blocked()
        assert nursery.child_tasks
        context.stop()
    await context.wait_stopped()
    context.kill()
    await context.wait_stopped()


async def test_kill_alone_also_wakes_who_waits_for_stop() -> None:
    context = Context("r1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(context.wait_stopped)
        await trio.testing.wait_all_tasks_blocked()
        context.kill()


async def test_stop_and_kill_work_while_their_caller_is_being_cancelled() -> None:
    context = Context("r1")
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.sleep_forever()
        finally:
            context.stop()
            context.kill()
    assert context.is_killed


async def test_a_wait_outside_the_handler_s_scope_ends_with_kill_and_not_with_stop() -> None:
    context = Context("r1")
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def waiter() -> None:
            with context.cancelled_by_kill() as scope:
                await trio.sleep_forever()
            assert scope.cancelled_caught

        await trio.testing.wait_all_tasks_blocked()
        context.stop()
        await trio.testing.wait_all_tasks_blocked()
        assert nursery.child_tasks
        context.kill()


async def test_a_wait_begun_after_the_kill_ends_at_once() -> None:
    context = Context("r1")
    context.kill()
    with context.cancelled_by_kill():
        await trio.sleep_forever()


async def test_a_wait_that_ended_by_itself_leaves_no_listener() -> None:
    context = Context("r1")
    with context.cancelled_by_kill() as scope:
        await trio.lowlevel.checkpoint()
    context.kill()
    assert not scope.cancel_called


async def test_errors_pass_through_a_killable_scope() -> None:
    with pytest.raises(ValueError, match="mine"), Context("r1").cancelled_by_kill():
        raise ValueError("mine")


async def test_a_listener_that_raises_loses_neither_the_kill_nor_its_neighbours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    context, told = Context("r1"), list[State]()

    def raises(state: State) -> None:
        raise ZeroDivisionError

    context.on_change(raises)
    context.on_change(told.append)
    with Context("parent") as parent:
        parent.link(context)
        context.stop()
        parent.kill()
    assert told == [State.STOPPED, State.KILLED]
    assert context.scope.cancel_called
    assert parent.is_killed
    assert caplog.text.count("request r1: a listener to") == 2
