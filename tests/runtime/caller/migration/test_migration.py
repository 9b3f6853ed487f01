"""One answer over several streams: decided by a table, tried at every token over real TCP."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import attrs
import pytest
import trio

from tests.runtime.endpoints import Cluster
from trinamo.runtime.caller.client import Client
from trinamo.runtime.caller.migration import (
    VERDICTS,
    MigratingAnswer,
    MigrationPolicy,
    MigrationSeries,
    Progress,
    ReplayVerdict,
    may_migrate,
)
from trinamo.runtime.context import Context
from trinamo.runtime.errors import (
    ConnectError,
    DeadlineError,
    DisconnectedError,
    EngineError,
    KilledError,
    OverloadedError,
    RateLimitedError,
    RemoteProtocolError,
    RequestError,
    TrinamoError,
    UnavailableError,
)
from trinamo.runtime.metrics.tallies import Registry
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason, GenerateRequest
from trinamo.runtime.sinks import Sink

LENGTH = 12
REQUEST = GenerateRequest(model="m", prompt="count", temperature=0)


class Taken(Sink[Delta]):
    """What the client would have got."""

    def __init__(self) -> None:
        super().__init__()
        self.deltas: list[Delta] = []

    def take(self, items: list[Delta]) -> bool:
        self.deltas += items
        return True

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def prompt_tokens(self) -> int:
        return sum(delta.prompt_tokens for delta in self.deltas)


@attrs.define
class Counting:
    """Workers that count on from what was delivered, and break where they are told."""

    breaks: list[tuple[int, TrinamoError]] = attrs.Factory(list)
    """Before which token, and how, in order."""
    asked: list[GenerateRequest] = attrs.Factory(list)
    finishes: bool = True
    """Whether the finish reason comes before a break at the very end."""

    async def __call__(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[Delta, None]:
        self.asked.append(request)
        prompt_tokens = 5
        begin = len(request.delivered_ids)
        assert request.delivered_ids == list(range(begin))
        for number in range(begin, LENGTH):
            if number > begin:
                self._break(number)
            is_last = number == LENGTH - 1 and self.finishes
            yield Delta(
                f"{number},", [number], FinishReason.STOP if is_last else None, prompt_tokens
            )
            prompt_tokens = 0
        self._break(LENGTH)
        if not self.finishes:
            yield Delta("", [], FinishReason.STOP, prompt_tokens)

    def _break(self, number: int) -> None:
        if self.breaks and self.breaks[0][0] == number:
            raise self.breaks.pop(0)[1]


def policy(registry: Registry | None = None, **changes: Any) -> MigrationPolicy:
    return MigrationPolicy(series=MigrationSeries(trio.current_time, registry), **changes)


async def serve(cluster: Cluster, handler: Counting, count: int = 2) -> Client:
    for number in range(count):
        await cluster.serve(f"{number + 1}", handler, request_type=GenerateRequest)
    return await cluster.client()


async def answer(
    client: Client,
    request: GenerateRequest = REQUEST,
    limits: MigrationPolicy | None = None,
    context: Context | None = None,
    **choices: Any,
) -> Taken:
    taken = Taken()
    choices = {"can_resume": True, **choices}
    context = context or Context("1")
    await MigratingAnswer(client, request, context, taken, limits or policy(), **choices).run()
    return taken


def lost() -> DisconnectedError:
    return DisconnectedError("the worker died")


def test_the_table_of_verdicts_is_this_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Every row is reached by the progress that it is for, and by every error that may migrate."""
    limits = policy(migrations_max=3, tokens_max=100)
    rows: dict[ReplayVerdict, Progress] = {
        ReplayVerdict.FINAL: Progress(policy=limits),
        ReplayVerdict.COMPLETE: Progress(policy=limits, is_finished=True, is_stopped=True),
        ReplayVerdict.STOPPED: Progress(policy=limits, is_stopped=True, is_taken=False),
        ReplayVerdict.SUSPECT: Progress(policy=limits, is_suspect=True, is_taken=False),
        ReplayVerdict.UNTAKEN: Progress(policy=limits, is_taken=False, is_named=True),
        ReplayVerdict.NAMED: Progress(policy=limits, is_named=True),
        ReplayVerdict.OFF: Progress(policy=policy(migrations_max=0), migration_count=9),
        ReplayVerdict.SPENT: Progress(policy=limits, migration_count=3, delivered_count=200),
        ReplayVerdict.LONG: Progress(policy=limits, delivered_count=51, prompt_tokens=50),
        ReplayVerdict.UNABLE: Progress(policy=limits, delivered_count=1, can_resume=False),
        ReplayVerdict.REPLACED: Progress(policy=limits, delivered_count=1, is_replaced=True),
        ReplayVerdict.MIGRATE: Progress(policy=limits, delivered_count=50, prompt_tokens=50),
    }
    assert list(rows) == list(VERDICTS) == [v for v in VERDICTS if v in ReplayVerdict]
    assert set(VERDICTS) == set(ReplayVerdict)
    elsewhere = [lost(), ConnectError(""), UnavailableError(""), OverloadedError("")]
    elsewhere.append(RemoteProtocolError(""))
    final = [EngineError(""), DeadlineError(""), RequestError(""), KilledError("")]
    for verdict, progress in rows.items():
        errors = final if verdict is ReplayVerdict.FINAL else elsewhere
        print(f"{verdict.name:<9} {', '.join(e.code for e in errors):<60} {verdict}")
        assert {may_migrate(error, progress) for error in errors} == {verdict}
    assert may_migrate(lost(), Progress(policy=limits, can_resume=False)) is ReplayVerdict.MIGRATE
    opened = Progress(policy=limits, is_opened=True)
    assert may_migrate(lost(), opened) is ReplayVerdict.UNABLE
    kept = attrs.evolve(opened, keeps_all=True, delivered_count=1, can_resume=False)
    assert may_migrate(lost(), kept) is ReplayVerdict.MIGRATE
    anew = [attrs.evolve(kept, is_replaced=True), Progress(policy=limits, is_replaced=True)]
    assert {may_migrate(lost(), each) for each in anew} == {ReplayVerdict.MIGRATE}
    assert "REPLAYED" in capsys.readouterr().out.upper()


@pytest.mark.parametrize("point", range(1, LENGTH))
async def test_an_answer_is_the_same_wherever_it_migrates(cluster: Cluster, point: int) -> None:
    """I11: no token is repeated or lost, and the prompt is counted once."""
    registry = Registry()
    workers = Counting([(point, lost())])
    client = await serve(cluster, workers)
    told: list[str] = []
    taken = await answer(
        client, limits=policy(registry), tell=lambda worker, _: told.append(worker)
    )
    assert taken.token_ids == list(range(LENGTH))
    assert taken.text == "".join(f"{number}," for number in range(LENGTH))
    assert (taken.prompt_tokens, taken.deltas[-1].finish_reason) == (5, FinishReason.STOP)
    assert [len(request.delivered_ids) for request in workers.asked] == [0, point]
    assert len(set(told)) == 2
    labels = {"kind": "ongoing", "outcome": "migrated"}
    assert registry.get_sample_value("trinamo_migrations_total", labels) == 1
    spent = registry.get_sample_value(
        "trinamo_migration_duration_seconds_count", {"outcome": "migrated"}
    )
    assert spent == 1


async def test_an_answer_migrates_as_often_as_it_may_and_then_says_what_was_tried(
    cluster: Cluster,
) -> None:
    registry = Registry()
    breaks: list[tuple[int, TrinamoError]] = [(n, lost()) for n in (2, 4, 6, 8)]
    client = await serve(cluster, Counting(breaks), count=5)
    taken = await answer(client, limits=policy(migrations_max=4))
    assert taken.token_ids == list(range(LENGTH))
    client = await serve(cluster, Counting([(n, lost()) for n in (2, 4, 6, 8)]), count=5)
    with pytest.raises(DisconnectedError) as failed:
        await answer(client, limits=policy(registry, migrations_max=3))
    assert failed.value.message.count("the worker died") == 4
    assert "router.migrations_max is reached" in failed.value.message
    assert not failed.value.definite
    assert registry.get_sample_value("trinamo_migrations_refused_total", {"reason": "spent"}) == 1


async def test_an_answer_whose_end_mark_alone_was_lost_is_complete(cluster: Cluster) -> None:
    workers = Counting([(LENGTH, lost())])
    client = await serve(cluster, workers)
    taken = await answer(client)
    assert (taken.token_ids, len(workers.asked)) == (list(range(LENGTH)), 1)


async def test_an_answer_without_its_finish_reason_gets_it_from_the_next_worker(
    cluster: Cluster,
) -> None:
    workers = Counting([(LENGTH, lost())], finishes=False)
    client = await serve(cluster, workers)
    taken = await answer(client)
    assert (taken.token_ids, taken.prompt_tokens) == (list(range(LENGTH)), 5)
    assert taken.deltas[-1].finish_reason is FinishReason.STOP
    assert len(workers.asked[1].delivered_ids) == LENGTH


@pytest.mark.parametrize(
    ("why", "choices", "limits"),
    [
        ("the request names its worker", {"instance_id": "1"}, {}),
        ("the engine cannot go on with an answer", {"can_resume": False}, {}),
        ("others serve the model by now", {"is_replaced": lambda: True}, {}),
        ("router.migrations_max is 0", {}, {"migrations_max": 0}),
        ("router.migration_tokens_max", {}, {"tokens_max": 6}),
    ],
)
async def test_what_cannot_migrate_says_why(
    cluster: Cluster, why: str, choices: dict[str, Any], limits: dict[str, Any]
) -> None:
    workers = Counting([(3, lost())])
    client = await serve(cluster, workers)
    with pytest.raises(DisconnectedError, match=why):
        await answer(client, limits=policy(**limits), **choices)
    assert len(workers.asked) == 1


async def test_tokens_that_will_not_be_replayed_are_not_kept(cluster: Cluster) -> None:
    client = await serve(cluster, Counting([(9, lost())]), count=1)
    taken = Taken()
    answered = MigratingAnswer(
        client, REQUEST, Context("1"), taken, policy(tokens_max=4), can_resume=True
    )
    with pytest.raises(DisconnectedError, match=r"router\.migration_tokens_max"):
        await answered.run()
    assert taken.token_ids == list(range(9))
    assert len(answered._token_ids) <= 4


async def test_what_was_not_kept_is_not_replayed_though_by_now_it_would_be(
    cluster: Cluster,
) -> None:
    """`router.migration_tokens_max` may be raised meanwhile."""
    limits, workers = policy(tokens_max=4), Counting([(9, lost())])

    class Raising(Taken):
        def take(self, items: list[Delta]) -> bool:
            limits.tokens_max = 100
            return super().take(items)

    taken, client = Raising(), await serve(cluster, workers)
    answered = MigratingAnswer(client, REQUEST, Context("1"), taken, limits, can_resume=True)
    with pytest.raises(DisconnectedError, match=r"router\.migration_tokens_max"):
        await answered.run()
    assert taken.token_ids == list(range(9))
    assert len(workers.asked) == 1


async def test_an_error_that_would_come_everywhere_ends_the_answer(cluster: Cluster) -> None:
    workers = Counting([(3, EngineError("no such thing"))])
    client = await serve(cluster, workers)
    with pytest.raises(EngineError, match=r"^no such thing$"):
        await answer(client)
    assert len(workers.asked) == 1


async def test_nobody_left_is_told_with_the_worker_that_died(cluster: Cluster) -> None:
    registry = Registry()
    handler = Counting([(3, lost())])
    client = await serve(cluster, handler, count=1)

    def leave(_: str, __: int | None) -> None:
        cluster.workers["1"].refuse_new()

    with pytest.raises(TrinamoError, match="replayed before, after 1: the worker died") as failed:
        await answer(client, limits=policy(registry), tell=leave)
    assert not failed.value.definite
    labels = {"kind": "ongoing", "outcome": "failed"}
    assert registry.get_sample_value("trinamo_migrations_total", labels) == 1


async def test_when_to_ask_again_is_told_also_behind_what_was_tried_before(
    cluster: Cluster,
) -> None:
    """An upstream's `Retry-After` is its client's, be it the second that was asked."""
    asked = 0

    async def refuse(request: GenerateRequest, context: Context) -> AsyncGenerator[Delta, None]:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise RateLimitedError("too often", retry_after_s=30)
        yield Delta("0,", [0], None, 5)
        raise lost()

    for number in range(2):
        await cluster.serve(f"{number}", refuse, request_type=GenerateRequest)
    with pytest.raises(RateLimitedError, match=r"too often.*replayed before") as failed:
        await answer(await cluster.client())
    assert failed.value.retry_after_s == 30


@pytest.mark.parametrize("seed", [None, 4])
async def test_every_stream_of_an_answer_has_the_same_seed(
    cluster: Cluster, seed: int | None
) -> None:
    workers = Counting([(3, lost())])
    client = await serve(cluster, workers)
    client.env.rng = random.Random(1)
    await answer(client, GenerateRequest(model="m", prompt="count", seed=seed))
    seeds = {request.seed for request in workers.asked}
    assert len(seeds) == 1
    assert None not in seeds
    assert seed is None or seeds == {seed}


async def test_a_stopped_answer_does_not_migrate(cluster: Cluster) -> None:
    workers = Counting([(3, lost())])
    client = await serve(cluster, workers)
    context = Context("1")
    with pytest.raises(DisconnectedError, match=r"^the worker died$"):
        await answer(client, context=context, tell=lambda *_: context.stop())
    assert len(workers.asked) == 1


async def test_a_client_that_leaves_during_a_migration_leaves_nothing_behind(
    cluster: Cluster,
) -> None:
    """S7: the cluster checks, when it is closed, that nobody works for the request any more."""
    registry = Registry()
    resumed = trio.Event()

    async def break_then_hang(request: GenerateRequest, _: Context) -> AsyncGenerator[Delta, None]:
        if request.delivered_ids:
            resumed.set()
            await trio.sleep_forever()
        yield Delta("0,", [0], None, 5)
        raise lost()

    for instance_id in ("1", "2"):
        await cluster.serve(instance_id, break_then_hang, request_type=GenerateRequest)
    client = await cluster.client()
    context = Context("1")
    limits = policy(registry)
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            # Which of the two comes first is left open: the scope, or what the stream says.
            with context.scope, suppress(KilledError):
                await answer(client, limits=limits, context=context)

        nursery.start_soon(ask)
        await resumed.wait()
        context.kill()
    labels = {"kind": "ongoing", "outcome": "cancelled"}
    assert registry.get_sample_value("trinamo_migrations_total", labels) == 1


async def test_what_a_worker_that_leaves_cuts_off_goes_on_elsewhere_or_says_so(
    cluster: Cluster,
) -> None:
    seen: list[str] = []

    async def slow(request: GenerateRequest, context: Context) -> AsyncGenerator[Delta, None]:
        begin = len(request.delivered_ids)
        seen.append(request.model)
        for number in range(begin, LENGTH):
            yield Delta(f"{number},", [number], FinishReason.STOP if number == 11 else None, 5)
            if number == 5 and not begin:
                await context.wait_stopped()
                return

    first = await cluster.serve("1", slow, request_type=GenerateRequest)
    client = await cluster.client()
    taken: dict[bool, Taken | TrinamoError] = {}

    async def ask(can_resume: bool) -> None:
        request = GenerateRequest(model=str(can_resume), prompt="count", temperature=0)
        asked = Context(str(can_resume))
        try:
            taken[can_resume] = await answer(client, request, can_resume=can_resume, context=asked)
        except TrinamoError as error:
            taken[can_resume] = error

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, True)
        nursery.start_soon(ask, False)
        while len(seen) < 2:
            await trio.sleep(0.001)
        await cluster.serve("2", slow, request_type=GenerateRequest)
        await client.router.wait_instances(2)
        await cluster.put("1", {"tcp": cluster.addresses["1"]}, draining=True)
        first.refuse_new()
        first.stop_all()
        await first.wait_idle()
    assert sorted(seen) == ["False", "True", "True"]
    whole, cut = taken[True], taken[False]
    assert isinstance(whole, Taken)
    assert whole.token_ids == list(range(LENGTH))
    assert isinstance(cut, UnavailableError)
    assert "shut down before the answer was complete" in cut.message


async def test_a_deadline_reaches_the_worker_and_ends_the_answer_everywhere(
    cluster: Cluster,
) -> None:
    left_s: list[float] = []
    limit_s = 1.0

    async def hang(_: GenerateRequest, context: Context) -> AsyncGenerator[Delta, None]:
        left_s.append(context.deadline - trio.current_time())
        yield Delta("0,", [0], None, 5)
        await trio.sleep_forever()

    await cluster.serve("1", hang, request_type=GenerateRequest)
    client = await cluster.client()
    context = Context("1")
    # A stall may use up the time of a request before the worker has it: then another one is made.
    with trio.fail_after(120):
        while not left_s:
            context = Context("1")
            context.limit(trio.current_time() + limit_s)
            with pytest.raises(DeadlineError, match="the request's time is up"):
                await answer(client, context=context)
    with pytest.raises(DeadlineError, match="the request's time is up"):
        await answer(client, context=context)
    (given_s,) = left_s
    assert given_s <= limit_s
