"""Contexts that are linked, at any time: none is behind whom it follows, and nothing is undone."""

from __future__ import annotations

import math

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from trinamo.runtime.context import Context, Reason, State

reasons = st.sampled_from(Reason)


@attrs.define(eq=False)
class Followed:
    """A context, and what must be true of it."""

    context: Context
    parent: Followed | None
    state: State = State.LIVE
    stop_reason: Reason | None = None
    kill_reason: Reason | None = None
    deadline: float = math.inf
    runs: bool = False
    """Its scope was asked for, as a handler's is."""
    told: list[State] = attrs.Factory(list)
    children: list[Followed] = attrs.Factory(list)

    def stop(self, reason: Reason) -> None:
        if self.state is State.LIVE:
            self.state, self.stop_reason = State.STOPPED, reason
            for child in self.children:
                child.stop(reason)

    def kill(self, reason: Reason) -> None:
        if self.state is not State.KILLED:
            self.state, self.kill_reason = State.KILLED, reason
            for child in self.children:
                child.kill(reason)

    def limit(self, deadline: float) -> None:
        self.deadline = min(self.deadline, deadline)
        for child in self.children:
            child.limit(deadline)


class Contexts(RuleBasedStateMachine):
    """A family of contexts beside the plainest model of one."""

    everyone: list[Followed]
    contexts = Bundle("contexts")

    @initialize(target=contexts)
    def first(self) -> Followed:
        self.everyone = []
        return self.made(Context("first"), None)

    def made(self, context: Context, parent: Followed | None) -> Followed:
        known = Followed(context, parent)
        context.on_change(known.told.append)
        context.on_change(lambda _: self.nobody_below_is_behind(known))
        self.everyone.append(known)
        return known

    def nobody_below_is_behind(self, known: Followed) -> None:
        """When somebody is told of a change, all whom it concerns below have had it."""
        known.told += [
            State.LIVE for child in known.children if child.context.state < known.context.state
        ]

    @rule(target=contexts, parent=contexts)
    def link_from_its_birth(self, parent: Followed) -> Followed:
        return self.linked(parent, Context("child", parent=parent.context))

    @rule(target=contexts, parent=contexts, reason=reasons, is_stopped=st.booleans())
    def link_late(self, parent: Followed, reason: Reason, is_stopped: bool) -> Followed:
        child = Context("late")
        if is_stopped:
            child.stop(reason)
        parent.context.link(child)
        known = self.linked(parent, child)
        if is_stopped:
            known.state = max(State.STOPPED, known.state)
            known.stop_reason = reason
        return known

    def linked(self, parent: Followed, context: Context) -> Followed:
        child = self.made(context, parent)
        parent.children.append(child)
        child.limit(parent.deadline)
        if parent.state is State.KILLED:
            assert parent.kill_reason is not None
            child.kill(parent.kill_reason)
        elif parent.state is State.STOPPED:
            assert parent.stop_reason is not None
            child.stop(parent.stop_reason)
        return child

    @rule(known=contexts, reason=reasons)
    def stop(self, known: Followed, reason: Reason) -> None:
        known.context.stop(reason)
        known.stop(reason)

    @rule(known=contexts, reason=reasons)
    def kill(self, known: Followed, reason: Reason) -> None:
        known.context.kill(reason)
        known.kill(reason)

    @rule(known=contexts, deadline=st.integers(1, 9))
    def limit(self, known: Followed, deadline: int) -> None:
        known.context.limit(float(deadline))
        known.limit(float(deadline))

    @rule(known=contexts)
    def run(self, known: Followed) -> None:
        known.runs = True

    @rule(known=contexts)
    def close(self, known: Followed) -> None:
        known.context.close()
        if known.parent is not None:
            known.parent.children.remove(known)
            known.parent = None

    @invariant()
    def each_is_as_far_as_it_was_told(self) -> None:
        for known in getattr(self, "everyone", ()):
            context = known.context
            assert context.state is known.state
            assert (context.stop_reason, context.kill_reason) == (
                known.stop_reason,
                known.kill_reason,
            )
            assert context.deadline == known.deadline
            assert context.child_count == len(known.children)

    @invariant()
    def kill_cancels_and_stop_does_not(self) -> None:
        for known in getattr(self, "everyone", ()):
            if known.runs:
                # The public name asks trio's clock, and there is none.
                is_cancelled = known.context.scope._cancel_called
                assert is_cancelled == (known.state is State.KILLED)

    @invariant()
    def each_change_is_told_once_and_in_order(self) -> None:
        for known in getattr(self, "everyone", ()):
            assert known.told == sorted(set(known.told)), known.told
            assert known.told[-1:] == ([known.state] if known.state else [])


TestContexts = Contexts.TestCase
