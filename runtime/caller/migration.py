"""One answer over as many streams as it takes: what one worker leaves undone another goes on with.

The tokens of each stream are written down as they pass. When a stream breaks, the request is sent
again with `delivered_ids`, and the next worker goes on behind them: the client sees a pause, no token
twice and none missing. `may_migrate` decides, and is a table; `MigratingAnswer` awaits.

What this module does not do: try other workers before an answer has begun (`client.py`), and take
an answer up (the engines).
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Collection, Mapping
from typing import Final

import attrs
import msgspec

from ..context import Context
from ..env import Env
from ..errors import DisconnectedError, TrinamoError, error_from_wire, error_to_wire
from ..metrics.tallies import Registry
from ..protocol.kv.names import RoutingHint
from ..protocol.openai.generate import TOKEN_CHARS_MAX, Delta, GenerateRequest
from ..protocol.openai.passing import COMMENT, can_go_on
from ..sinks import Sink
from ..traces.trace import Leg
from .client import Client
from .search import ELSEWHERE, Patience, is_suspect

_log = logging.getLogger("trinamo.migration")
_SEED_BITS: Final = 63
_CHAT_PATH: Final = "/v1/chat/completions"
"""Of requests whose bodies are passed through, the only ones that go on behind a text."""
_GAP_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class MigrationSeries:
    """The series of one process; without a `registry` nobody is shown them.

    `kind` is `new` for an answer that the client had nothing of, `ongoing` for one that had begun.
    """

    def __init__(self, now: Callable[[], float], registry: Registry | None = None) -> None:
        self.now = now
        """Seconds, of the clock that durations are measured with."""
        registry = registry or Registry()
        self._migrations = registry.counts(
            "migrations",
            "Answers that lost their worker and were replayed at another, by how that went",
            *("kind", "outcome"),
        )
        self._durations = registry.histograms(
            "migration_duration_seconds",
            "From the loss of the worker to the next token, or to the end of the request",
            _GAP_BUCKETS_S,
            "outcome",
        )
        self._refused = registry.counts(
            "migrations_refused",
            "Answers that lost their worker and could not be replayed, by why",
            "reason",
        )

    def ended(self, *, is_new: bool, outcome: str, since: float) -> None:
        """A migration that began at `since` has ended: `migrated`, `failed` or `cancelled`."""
        self._migrations.tally("new" if is_new else "ongoing", outcome).value += 1
        self._durations.tally(outcome).observe(self.now() - since)

    def refused(self, reason: str) -> None:
        """An answer ends with its worker, for `reason`: the name of a `ReplayVerdict`."""
        self._refused.tally(reason).value += 1


@attrs.define(kw_only=True, eq=False)
class MigrationPolicy:
    """When an answer is replayed, and where that is counted; its bounds may change."""

    series: MigrationSeries
    migrations_max: int = 3
    """Of one answer; 0: none."""
    tokens_max: int = 1 << 17
    """A longer sequence, prompt and answer together, is not computed again."""


class ReplayVerdict(enum.StrEnum):
    """What becomes of an answer whose stream has ended with an error, and why."""

    MIGRATE = "it is replayed at another worker"
    COMPLETE = "it is complete: only its end mark was lost"
    FINAL = "it would fail elsewhere too"
    STOPPED = "the request was stopped"
    SUSPECT = "not replayed again: two workers fell silent while they held the request"
    UNTAKEN = "no worker took it"
    NAMED = "not replayed elsewhere: the request names its worker"
    OFF = "not replayed elsewhere: router.migrations_max is 0"
    SPENT = "not replayed again: router.migrations_max is reached"
    LONG = "not replayed elsewhere: it has more tokens than router.migration_tokens_max"
    UNABLE = "not replayed elsewhere: the engine cannot go on with an answer"
    REPLACED = "not replayed elsewhere: others serve the model by now, and contradict its card"


_SILENT: Final = (ReplayVerdict.FINAL, ReplayVerdict.STOPPED, ReplayVerdict.UNTAKEN)
"""These say nothing that the error itself does not."""


@attrs.frozen(kw_only=True)
class Progress:
    """How far an answer has come when its stream ends with an error."""

    policy: MigrationPolicy
    delivered_count: float = 0
    """Tokens that the client has; infinite where they are not kept any more."""
    prompt_tokens: int = 0
    """As the first worker said; 0 if none has."""
    migration_count: int = 0
    is_refused: bool = False
    """Whether it was not the worker that failed, but whoever takes its answer."""
    is_taken: bool = True
    """Whether a worker had begun this stream."""
    is_finished: bool = False
    """Whether the finish reason has come."""
    is_stopped: bool = False
    is_suspect: bool = False
    is_named: bool = False
    """The request names its worker."""
    can_resume: bool = True
    """Whether the model's engine goes on behind delivered tokens."""
    is_replaced: bool = False
    """Whether those who would be asked make other tokens than those who began it."""
    keeps_all: bool = False
    """Whether the client has nothing of it, so that any engine can make it anew."""
    is_opened: bool = False
    """Whether the client has what opens an answer and cannot be left out of the next one."""


# fmt: off
VERDICTS: Final[Mapping[ReplayVerdict, Callable[[TrinamoError, Progress], bool]]] = {
    ReplayVerdict.FINAL:    lambda error, now: now.is_refused or not isinstance(error, ELSEWHERE),
    ReplayVerdict.COMPLETE: lambda _, now: now.is_finished,
    ReplayVerdict.STOPPED:  lambda _, now: now.is_stopped,
    ReplayVerdict.SUSPECT:  lambda _, now: now.is_suspect,
    ReplayVerdict.UNTAKEN:  lambda _, now: not now.is_taken,
    ReplayVerdict.NAMED:    lambda _, now: now.is_named,
    ReplayVerdict.OFF:      lambda _, now: now.policy.migrations_max == 0,
    ReplayVerdict.SPENT:    lambda _, now: now.migration_count >= now.policy.migrations_max,
    ReplayVerdict.LONG:     lambda _, now: now.prompt_tokens + now.delivered_count > now.policy.tokens_max,
    ReplayVerdict.UNABLE:   lambda _, now: not now.keeps_all
                                     and (now.is_opened or (now.delivered_count > 0 and not now.can_resume)),
    ReplayVerdict.REPLACED: lambda _, now: not now.keeps_all and now.is_replaced and now.delivered_count > 0,
    ReplayVerdict.MIGRATE:  lambda _, __: True,
}
"""The first that holds, from the top."""
# fmt: on


def may_migrate(error: TrinamoError, progress: Progress) -> ReplayVerdict:
    """What becomes of an answer whose stream ended with `error`: the first of `VERDICTS`."""
    return next(verdict for verdict, holds in VERDICTS.items() if holds(error, progress))


class MigratingAnswer(Sink[Delta]):
    """One answer on its way to `sink`: as a sink, it writes down what every stream brings.

    `servers` says who may be asked now, None for anybody, and `is_replaced` whether they would make other
    tokens than those of whom it began with: then they may not go on with it. `tell` is called with the id of each worker
    that takes the request up, and how many blocks of the prompt it had, if that is known, and `accepted`
    as by `Client.stream`; `hint` makes
    what the router is told about the prompt, once a stream.
    """

    def __init__(
        self,
        client: Client,
        request: GenerateRequest,
        context: Context,
        sink: Sink[Delta],
        policy: MigrationPolicy,
        *,
        instance_id: str | None = None,
        servers: Callable[[], Collection[str] | None] = lambda: None,
        is_replaced: Callable[[], bool] = lambda: False,
        tell: Callable[[str, int | None], None] | None = None,
        accepted: Callable[[], None] | None = None,
        can_resume: bool = False,
        hint: Callable[[GenerateRequest], RoutingHint | None] | None = None,
    ) -> None:
        super().__init__()
        self._client, self._context, self._policy = client, context, policy
        self._instance_id, self._tell, self._accepted = instance_id, tell, accepted
        self._servers, self._is_replaced = servers, is_replaced
        self._can_resume = can_resume and (
            not request.body or (request.path == _CHAT_PATH and can_go_on(request.body))
        )
        self._hint = hint
        self._request = _seeded(request, client.env) if can_resume else request
        self._sink, self._take = sink, sink.take
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        """Of answers that are passed through: they have no token ids."""
        self._text_chars = 0
        self._delivered = 0
        """Tokens that these have brought."""
        self._opening = b""
        """The first thing that they have brought."""
        self._tokens_max = policy.tokens_max
        self._prompt_tokens = 0
        self._is_finished = self._is_long = self._is_refused = False
        # Of the stream that goes on.
        self._is_taken = self._has_brought = False
        self._tried: list[str] = []
        """What became of the streams before it, in words."""
        self._lost: list[str] = []
        """The workers they were lost with."""
        self._broken: tuple[float, bool, Leg] | None = None
        """When the last stream broke, and whether it had brought nothing; until the next one does."""

    # --- a sink, in plain calls: each token costs a loop's turn and the extension of a list ---

    def on_room(self, listener: Callable[[], None]) -> None:
        self._sink.on_room(listener)

    def take(self, items: list[Delta]) -> bool:
        """Write the tokens down, and hand `items` on."""
        if items[0].raw == COMMENT and all(each.raw == COMMENT for each in items):
            # An upstream's comment is no beginning: nothing is lost if the answer begins anew.
            return self._take(items)
        token_ids = self._token_ids
        for delta in items:
            token_ids += delta.token_ids
            if delta.raw and delta.raw != COMMENT:
                self._pass(delta)
            if delta.finish_reason is not None:
                self._is_finished = True
        if not self._has_brought:
            items = self._begin(items)
        if len(token_ids) > self._tokens_max:
            # It will not be replayed: what is kept stays bounded.
            self._is_long = True
            token_ids.clear()
        try:
            return self._take(items)
        except Exception:
            # Ours, such as a bound that is reached: it would be elsewhere, too.
            self._is_refused = True
            raise

    def _pass(self, delta: Delta) -> None:
        """One item of an answer that is passed through."""
        self._opening = self._opening or delta.raw
        self._delivered += delta.output_tokens
        if self._can_resume:
            self._texts.append(delta.text)
            self._text_chars += len(delta.text)
            # What is no text, such as a call of a tool, nobody could go on behind.
            self._can_resume = bool(delta.text) or not delta.output_tokens
            if max(self._delivered, self._text_chars // TOKEN_CHARS_MAX) > self._tokens_max:
                self._is_long = True
                self._texts.clear()

    def _begin(self, items: list[Delta]) -> list[Delta]:
        """A stream has brought its first items; the length of the prompt is told once an answer."""
        self._has_brought = True
        self._settle("migrated")
        if not self._prompt_tokens:
            self._prompt_tokens = items[0].prompt_tokens
            return items
        return [msgspec.structs.replace(items[0], prompt_tokens=0), *items[1:]]

    # --- stream after stream ---

    async def run(self) -> None:
        """Hand the whole answer to the sink; returns at its complete end.

        Raises what ended the last stream, with what was tried before it. Cancelled, or killed, it
        leaves nothing behind.
        """
        try:
            while True:
                self._is_taken = self._has_brought = False
                if self._sink.keeps_all and (
                    self._request.body or not self._can_resume or self._is_replaced()
                ):
                    # What the client does not have is forgotten.
                    self._sink.restart()
                    self._token_ids.clear()
                    self._texts.clear()
                    self._delivered, self._text_chars, self._opening = 0, 0, b""
                    self._prompt_tokens = 0
                request = self._resumed()
                is_new = request is self._request
                stream = self._client.stream(
                    request,
                    Delta,
                    context=self._context,
                    instance_id=self._instance_id,
                    among=self._servers if is_new else self._who_goes_on,
                    hint=None if self._hint is None else self._hint(request),
                    patience=Patience(self._lost, waits_for_room=bool(self._tried)),
                    accepted=self._accepted,
                )
                worker = ""
                try:
                    async with stream:
                        self._is_taken, worker = True, stream.instance.id
                        if self._tell is not None:
                            self._tell(worker, stream.cached_blocks)
                        await stream.forward(self)
                    break
                except TrinamoError as error:
                    if self._is_over(error, worker):
                        break
            # An answer may have no tokens at all.
            self._settle("migrated")
        finally:
            self._settle("cancelled")

    def _is_over(self, error: TrinamoError, worker: str) -> bool:
        """Whether the answer is complete although its stream ended with `error`; raises if it is lost.

        Else it is replayed.
        """
        verdict = may_migrate(error, self._progress())
        if verdict is ReplayVerdict.MIGRATE:
            self._break(worker, error)
            return False
        if verdict is ReplayVerdict.COMPLETE:
            _log.info("request %s: %s (%s)", self._context.id, verdict, error.message)
            return True
        self._settle("cancelled" if self._context.is_killed else "failed")
        says = [] if verdict in _SILENT else [str(verdict)]
        if says:
            self._policy.series.refused(verdict.name.lower())
        if self._tried:
            says.append(f"replayed before, after {'; '.join(self._tried)}")
        if not says or self._context.is_stopped:
            raise error
        text = f"{error.message} ({'; '.join(says)})"
        # What has begun may have happened.
        definite = error.definite and not (self._delivered_count or self._is_long)
        told = {**error_to_wire(error), "message": text, "definite": definite}
        raise error_from_wire(**told) from error

    def _who_goes_on(self) -> Collection[str] | None:
        return frozenset() if self._is_replaced() else self._servers()

    def _resumed(self) -> GenerateRequest:
        if self._opening:
            return msgspec.structs.replace(
                self._request,
                delivered_text="".join(self._texts),
                delivered_tokens=self._delivered,
                opening=self._opening,
            )
        if not self._token_ids:
            return self._request
        delivered = [*self._request.delivered_ids, *self._token_ids]
        return msgspec.structs.replace(self._request, delivered_ids=delivered)

    def _progress(self) -> Progress:
        return Progress(
            policy=self._policy,
            delivered_count=math.inf if self._is_long else self._delivered_count,
            prompt_tokens=self._prompt_tokens,
            migration_count=len(self._tried),
            is_refused=self._is_refused,
            is_taken=self._is_taken,
            is_finished=self._is_finished,
            is_stopped=self._context.is_stopped,
            is_suspect=is_suspect(self._context),
            is_named=self._instance_id is not None,
            can_resume=self._can_resume,
            is_replaced=self._is_replaced(),
            keeps_all=self._sink.keeps_all,
            is_opened=bool(self._opening) and self._request.path != _CHAT_PATH,
        )

    @property
    def _delivered_count(self) -> int:
        return len(self._token_ids) + self._delivered

    def _break(self, worker: str, error: TrinamoError) -> None:
        delivered = self._delivered_count
        leg = self._context.trace.begin(
            "migration", left=worker, delivered_tokens=delivered, reason=error.code
        )
        self._broken = self._policy.series.now(), not delivered, leg
        self._tried.append(f"{worker}: {error.message}")
        if isinstance(error, DisconnectedError):
            self._lost.append(worker)
        self._client.env.note(
            "migration", request=self._context.id, instance=worker, delivered=delivered
        )
        text = "request %s: %d tokens were delivered when %s ended the stream; it is replayed: %s"
        _log.info(text, self._context.id, delivered, worker, error.message)

    def _settle(self, outcome: str) -> None:
        if self._broken is not None:
            (since, is_new, leg), self._broken = self._broken, None
            leg.finish("success" if outcome == "migrated" else outcome)
            self._policy.series.ended(is_new=is_new, outcome=outcome, since=since)


def _seeded(request: GenerateRequest, env: Env) -> GenerateRequest:
    """With the seed fixed before the first stream, so that all of them draw the same tokens."""
    if request.body or request.seed is not None or request.temperature == 0:
        # The body is the client's: what it leaves unset stays so.
        return request
    return msgspec.structs.replace(request, seed=env.rng.getrandbits(_SEED_BITS))
