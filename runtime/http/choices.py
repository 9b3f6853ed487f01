"""An answer of several choices: one request for each, all in one nursery, whose deltas meet in one answer.

They are so many prompts of one body, or so many answers to each (`n`). The answer holds one place
among the requests in flight; for more choices at the same time it takes more places while any are
free, else they come one after another in the place that it has. While requests wait for a place,
each of these further places goes to them when its choice ends. A worker that refuses one more lets
it wait for those before it. Each is sent a copy of the prompt: copies of a long one count as bodies do,
and the first choice goes alone until its answer begins. What fails for one choice fails the answer, and ends the others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import attrs
import trio

from ..context import Context
from ..engines.generation import Forward
from ..errors import OverloadedError
from ..nurseries import open_nursery
from ..protocol.openai.answers import AnswerFormat
from ..protocol.openai.generate import Delta, GenerateRequest
from ..sinks import Sink
from .admission.admission import LOOK_INTERVAL_S, Admission
from .bodies import SMALL_BODY_BYTES, Body
from .streaming import AnswerDelivery, AnswerSink, check_complete, kept_bytes

MakeForward: TypeAlias = Callable[[Callable[[], None]], Forward]
"""Makes what forwards one choice of what it calls when a worker begins to answer it."""


class ChoicesSink(AnswerSink):
    """The whole answer; its `choices` take the deltas. `make_form` makes that of a choice, by its index.

    The `choices_each` of one prompt stand together: the prompt's tokens count once.
    """

    def __init__(
        self,
        to: AnswerDelivery,
        make_form: Callable[[int], AnswerFormat],
        count: int,
        *,
        choices_each: int,
        is_streamed: bool,
    ) -> None:
        super().__init__(to)
        self.keeps_all = not is_streamed
        self.choices = [ChoiceSink(self, partial(make_form, index)) for index in range(count)]
        self._first_ones = self.choices[::choices_each]
        to.exchange.on_room(self.room_again)

    def take(self, items: list[Delta]) -> bool:
        return self.choices[0].take(items)

    def room_again(self) -> None:
        for each in self.choices:
            each.room_again()

    @property
    def has_begun(self) -> bool:
        return any(each.has_begun for each in self.choices)

    def come(self, tokens: int, deltas: int, size: int) -> None:
        """So much has come of any choice, of which `size` bytes are kept; raises if it is too much."""
        self._bound(tokens + deltas, size)
        self._record.token(tokens)

    def gone(self, tokens: int, deltas: int, size: int) -> None:
        """So much of what has come begins anew."""
        self._left += tokens + deltas
        self._size -= size
        self._record.output_tokens -= tokens

    def release(self) -> None:
        self._count_prompts()
        self.choices.clear()
        self._first_ones.clear()

    def ended(self, reason: str) -> None:
        self._record.finish_reasons.append(reason)

    def _count_prompts(self) -> None:
        told = self._first_ones
        tokens = sum(each.prompt_tokens for each in told)
        self._record.prompt(tokens, sum(each.cached_tokens for each in told))

    def finish(self) -> None:
        check_complete(is_complete=all(each.is_complete for each in self.choices))
        self._count_prompts()
        forms = [each.form for each in self.choices]
        if self.keeps_all:
            body = forms[0].to_body(self._usage, forms[1:])
            self._exchange.respond(200, body, self._to.headers)
            return
        self._start()
        self._exchange.finish(forms[0].end_events(self._usage))


class ChoiceSink(Sink[Delta]):
    """One choice on its way into the answer. Its last event waits until it is known to be whole."""

    def __init__(self, to: ChoicesSink, make_form: Callable[[], AnswerFormat]) -> None:
        super().__init__()
        self.keeps_all = to.keeps_all
        self._to, self._make_form = to, make_form
        self.silence_count = 0
        """See `Context`, of the tries before."""
        self._begin()

    def _begin(self) -> None:
        """Anew, if need be; `is_complete` once a delta with a finish reason has come."""
        self.form = self._make_form()
        self.prompt_tokens = self.cached_tokens = 0
        self._tokens = self._deltas = self._size = 0
        self.is_complete, self._last = False, b""

    @property
    def has_begun(self) -> bool:
        return self._deltas > 0

    def take(self, items: list[Delta]) -> bool:
        tokens = size = 0
        events = [self._last]
        for delta in items:
            tokens += len(delta.token_ids)
            if delta.prompt_tokens:
                self.prompt_tokens, self.cached_tokens = delta.prompt_tokens, delta.cached_tokens
            if self.keeps_all:
                size += kept_bytes(delta)
                self.form.add_text(delta)
            else:
                events.append(self.form.add_event(delta))
        self._tokens, self._deltas, self._size = (
            self._tokens + tokens,
            self._deltas + len(items),
            self._size + size,
        )
        self._to.come(tokens, len(items), size)
        reasons = [delta.finish_reason for delta in items if delta.finish_reason is not None]
        data = b"".join(events)
        if reasons and not self.is_complete:
            self.is_complete, self._last = True, data
            self._to.ended(reasons[0])
            return True
        self._last = b""
        return self._to.write(data)

    def restart(self) -> None:
        super().restart()
        self._to.gone(self._tokens, self._deltas, self._size)
        self._begin()

    def finish(self) -> None:
        """Nothing follows: what waited is sent. Raises `EngineError` if that is no whole answer."""
        check_complete(is_complete=self.is_complete)
        self._to.write(self._last)
        self._last = b""


async def answer_choices(
    requests: Sequence[GenerateRequest],
    delivery: AnswerDelivery,
    sink: ChoicesSink,
    forward: MakeForward,
    admission: Admission,
    copy_bytes: int,
) -> None:
    """Have each of `requests` answered into its choice of `sink`; return once all are.

    Each is encoded in about `copy_bytes`, and kept so until its answer begins.
    Inside the scope of the delivery's context, whose children theirs are. Raises what `forward`
    does, `OverloadedError` too if nobody takes one for so long as a request may wait.
    """
    async with open_nursery() as nursery:
        pending = deque(enumerate(requests))
        work = _Work(delivery, sink, forward, admission, nursery, pending, copy_bytes)
        work.begin()
        if copy_bytes > SMALL_BODY_BYTES:
            # Of a prompt that every worker refuses there is one copy, and not one for each choice; and
            # the others find what was computed for the first. That a worker has opened the stream tells
            # nothing yet: it does so before it looks at the prompt.
            await work.has_begun.wait()
        # A first choice that was stopped meanwhile has left the request's own place: the last of those that began
        # now would take that for its own, and never give back the one that was taken for it.
        while work.running and work.pending and work.has_room and admission.take_place():
            work.begin()
        if not work.has_room:
            work.given_back = len(work.pending)


@attrs.define(eq=False)
class _Work:
    """The choices of one answer that are not begun, and how many are under way."""

    delivery: AnswerDelivery
    sink: ChoicesSink
    forward: MakeForward
    admission: Admission
    nursery: trio.Nursery
    pending: deque[tuple[int, GenerateRequest]]
    copy_bytes: int
    has_begun: trio.Event = attrs.field(factory=trio.Event)
    """Set once the answer of a choice has begun, or it was stopped before."""
    running: int = 0
    """The first in the place of the request itself."""
    given_back: int = 0
    """Places that went to requests that waited, or for which copies had no room: it takes them again."""

    @property
    def has_room(self) -> bool:
        """Whether another copy of the prompt finds room beside the bodies of all requests."""
        return self.admission.bodies.has_room_for_copy(self.copy_bytes)

    def begin(self) -> None:
        """Begin the next choice, in a place that it has."""
        self.running += 1
        copy = Body(self.admission.bodies)
        self._hold(copy)
        self.nursery.start_soon(self.go_on, copy, *self.pending.popleft())

    def _hold(self, copy: Body) -> None:
        if self.has_room:
            # One that is the only one under way goes on without.
            copy.hold(self.copy_bytes)

    async def go_on(self, copy: Body, index: int, request: GenerateRequest) -> None:
        """Answer one after the other, until none is left or there is no room beside those of others."""
        refused_at = math.inf
        try:
            while not self.delivery.context.is_stopped:
                try:
                    await self._answer(copy, index, request)
                except OverloadedError as refusal:
                    if not refusal.definite or self.sink.choices[index].has_begun:
                        raise
                    if self.running > 1:
                        self.pending.appendleft((index, request))
                        return
                    refused_at = min(refused_at, trio.current_time())
                    waited_s = trio.current_time() - refused_at
                    if not self.sink.has_begun or waited_s > self.admission.queue.timeout_s:
                        raise
                    await trio.sleep(LOOK_INTERVAL_S)
                    continue
                refused_at = math.inf
                self.has_begun.set()
                if not self.pending:
                    return
                if self.running > 1 and (self.admission.queue.length or not self.has_room):
                    self.given_back += 1
                    return
                index, request = self.pending.popleft()
                self._hold(copy)
                # No more than that: a worker that refused one more would refuse each of them again.
                while self._may_begin_more and self.admission.take_place():
                    self.given_back -= 1
                    self.begin()
            # Stopped, perhaps before anything began. What fails wakes nobody, and ends the others.
            self.has_begun.set()
        finally:
            copy.hold(0)
            self.running -= 1
            if self.running:
                self.admission.give_place()

    @property
    def _may_begin_more(self) -> bool:
        return bool(self.pending and self.given_back and self.has_room)

    async def _answer(self, copy: Body, index: int, request: GenerateRequest) -> None:
        context, choice = self.delivery.context, self.sink.choices[index]
        forward = self.forward(partial(self._begun, copy))
        with Context(f"{context.id}.{index}", parent=context) as own:
            own.silence_count = choice.silence_count
            try:
                with own.scope as scope:
                    await forward(request, own, choice)
            finally:
                choice.silence_count = own.silence_count
            if scope.cancelled_caught or own.cut_by:
                raise self.delivery.end_cut(own)
            choice.finish()

    def _begun(self, copy: Body) -> None:
        """The answer of a choice begins: its prompt is sent to no other worker."""
        self.has_begun.set()
        copy.hold(0)
