"""Plays the plan of a soak over real processes: load, faults, a look at what is left, a table.

`plan.py` says what happens, `asking.py` judges answers, `census.py` asks what the processes hold.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Final

import attrs
import httpx
import trio

from tests.cluster.processes import until
from tests.soak import census, series
from tests.soak.asking import Answer, Outcome, ask_in_time, judged
from tests.soak.balancing import LOOK_S, Balancer
from tests.soak.ledger import Ledger, error_lines
from tests.soak.plan import TOOLS_FILE, Act, Ask, Fault, Question, Turn, ask_of
from tests.soak.processes import Process, Server
from tests.soak.series import Series
from trinamo.cli.up.certs import write_secret
from trinamo.runtime.config.config import load_config
from trinamo.runtime.errors import ConfigError
from trinamo.transports.servers import open_etcd_server, open_nats_server

SHOWN_S: Final = 10.0
RETRY_S_MAX: Final = 3.0
RECOVERY_S: Final = 20.0
"""What may be refused behind the time in which nobody could answer: a lease, and a pause of a client."""
UNDISTURBED_AT_ONCE: Final = 6
LAME_DUCK: Final = {"http.lame_duck_s": 15}


@attrs.define(eq=False)
class Soak:
    """One run."""

    seed: int
    clients: int
    ledger: Ledger
    servers: list[Server]
    frontends: list[Process]
    settings: dict[str, Any]
    began_s: float = attrs.field(factory=trio.current_time)
    workers: list[Process] = attrs.field(factory=list)
    wholes: dict[int, Answer] = attrs.field(factory=dict)
    """The undisturbed answer to each question."""
    series: Series = attrs.field(init=False)
    balancer: Balancer = attrs.field(init=False)
    gone_s: dict[str, float] = attrs.field(factory=dict)
    """When a frontend was killed or stopped last; it is not over while it is stopped."""
    suffering: set[str] = attrs.field(factory=set)
    nobody_s: dict[str, float] = attrs.field(factory=dict)
    """By model, the longest time in which no worker could answer."""

    def __attrs_post_init__(self) -> None:
        self.series = Series(self.ledger.out)
        self.balancer = Balancer(
            lambda: {each.name: each.facts["url"] for each in self.frontends if each.facts}
        )

    @property
    def now_s(self) -> float:
        return trio.current_time() - self.began_s

    @property
    def members(self) -> list[Process]:
        return [*self.frontends, *self.workers]

    def find(self, text: str) -> None:
        self.ledger.find(self.now_s, text)

    async def play(self, turn: Turn) -> None:
        """One turn: workers start, answers are taken undisturbed, then load and faults, then rest."""
        print(f"{self.now_s:6.0f} s: {turn.name}, {len(turn.faults)} faults", flush=True)
        async with trio.open_nursery() as watchers:
            watchers.start_soon(self._show)
            async with self._workers(turn):
                for member in self.members:
                    watchers.start_soon(member.watch)
                await self._undisturbed(turn)
                async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
                    before = await self._census(client)
                    await self._disturbed(turn)
                    after = await self._census(client, before)
            watchers.cancel_scope.cancel()
        print(f"{turn.name}: held after it, and (before it), at rest:")
        print(*census.table(before, after), sep="\n")
        for found in census.complaints(before, after):
            self.find(f"{turn.name}: {found}")

    @asynccontextmanager
    async def _workers(self, turn: Turn) -> AsyncIterator[None]:
        models = {"worker.engine": "exact"}
        if not turn.is_disaggregated:
            models = {"worker.models": f"exact=exact,caller={TOOLS_FILE}:engine"}
        settings = {
            **self.settings,
            **turn.settings,
            **models,
            "disaggregation.prefill_tokens_local_max": 32,
        }
        self.workers = [
            Process(
                name,
                role,
                {**settings, "worker.role": role},
                self.ledger.out / f"{turn.number}-{name}.log",
                self.find,
                self.servers,
            )
            for name, role in turn.workers.items()
        ]
        try:
            await together(each.start for each in self.workers)
            await self._wait_found(turn)
            yield
            await together(each.end for each in self.workers)
        finally:
            with trio.CancelScope(shield=True):
                await together(each.close for each in self.workers)

    async def _wait_found(self, turn: Turn) -> None:
        """Until both frontends answer every model, and decode workers know who prefills."""
        models = {each.body["model"] for each in turn.questions}
        answering = [each for each in self.workers if each.role != "prefill"]

        async def is_found() -> bool:
            async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
                for frontend in self.frontends:
                    page = (await client.get(f"{frontend.facts['url']}/metrics")).text
                    live = census.gauge(page, ["live_instances"])
                    listed = (await client.get(f"{frontend.facts['url']}/v1/models")).json()
                    if not models <= {each["id"] for each in listed["data"]}:
                        return False
                    if live < len(models) * len(answering):
                        return False
                for worker in answering if turn.is_disaggregated else ():
                    health = (await client.get(f"{worker.status_url}/health")).json()
                    if health["disaggregation"]["prefill_workers"] < 2:
                        return False
            return True

        await until(is_found, "everybody knows everybody")

    async def _undisturbed(self, turn: Turn) -> None:
        """The right answers, by the first turn that asks; whoever asks again must get the same."""
        places = trio.CapacityLimiter(UNDISTURBED_AT_ONCE)

        async def take(client: httpx.AsyncClient, question: Question) -> None:
            request_id = f"undisturbed-{turn.number}-{question.number}"
            is_streamed = not (turn.number + question.number) % 2
            async with places:
                answer, _ = await ask_in_time(
                    client,
                    self.frontends[is_streamed].facts["url"],
                    question,
                    request_id=request_id,
                    is_streamed=is_streamed,
                )
            whole = self.wholes.setdefault(question.number, answer)
            if answer.status != 200 or not answer.is_ended or answer.differences(whole):
                self.find(f"{request_id}, undisturbed: {answer}")

        async with http_client() as client, trio.open_nursery() as nursery:
            for question in turn.questions:
                nursery.start_soon(take, client, question)

    async def _census(
        self, client: httpx.AsyncClient, before: census.Census | None = None
    ) -> census.Census:
        """Once nobody holds anything, or more than `before`; or as it is after a bounded time."""
        etcd = self.servers[0].server.address
        with trio.move_on_after(census.SETTLE_S):
            while True:
                found = await census.take(client, self.members, self.servers, etcd)
                if not (census.complaints(before, found) if before else found.busy):
                    return found
                await trio.sleep(1)
        return await census.take(client, self.members, self.servers, etcd)

    async def _disturbed(self, turn: Turn) -> None:
        """Load and faults; returns when every client has its last answer and every process is back."""
        began_s = self.now_s
        ends_s = began_s + turn.length_s
        async with http_client() as client, trio.open_nursery() as looks:
            looks.start_soon(self.balancer.run, client)
            looks.start_soon(self._sample)
            for model in {each.body["model"] for each in turn.questions}:
                looks.start_soon(self._watch_out, model)
            await trio.sleep(2 * LOOK_S)
            async with trio.open_nursery() as nursery:
                for number in range(self.clients):
                    nursery.start_soon(self._client, client, turn, number, ends_s)
                for fault in turn.faults:
                    nursery.start_soon(self._fault, fault, began_s)
            looks.cancel_scope.cancel()

    async def _fault(self, fault: Fault, began_s: float) -> None:
        await trio.sleep(max(0.0, began_s + fault.at_s - self.now_s))
        if self.suffering & set(fault.targets):
            self.ledger.note(self.now_s, f"left out, it is not back yet: {fault}")
            return
        self.ledger.note(self.now_s, str(fault))
        everybody: list[Process | Server] = [*self.servers, *self.members]
        self.suffering |= set(fault.targets)
        async with trio.open_nursery() as nursery:
            for each in everybody:
                if each.name in fault.targets:
                    nursery.start_soon(self._suffer, each, fault)
        self.suffering -= set(fault.targets)

    async def _suffer(self, target: Process | Server, fault: Fault) -> None:
        if fault.act is Act.TERMINATE:
            await target.end()
        else:
            self.balancer.bar(target.name)
            self.gone_s[target.name] = float("inf")
            if fault.act is Act.KILL:
                await target.kill()
            else:
                target.freeze()
        await trio.sleep(fault.away_s)
        if fault.act is Act.STOP:
            target.thaw()
        else:
            await target.start()
        self.gone_s[target.name] = self.now_s
        self.balancer.barred.discard(target.name)
        self.ledger.note(self.now_s, f"{target.name} is back")

    async def _watch_out(self, model: str) -> None:
        """Measure for how long no worker could answer."""
        last_s = self.now_s
        while True:
            if any(each.is_up for each in self.workers if each.role != "prefill"):
                last_s = self.now_s
            longest_s = max(self.nobody_s.get(model, 0.0), self.now_s - last_s)
            self.nobody_s[model] = longest_s
            await trio.sleep(LOOK_S)

    async def _show(self) -> None:
        while True:
            await trio.sleep(SHOWN_S)
            away = f"; away: {', '.join(sorted(self.suffering))}" if self.suffering else ""
            print(f"{self.now_s:6.0f} s: {self.ledger.line()}{away}", flush=True)

    async def _sample(self) -> None:
        servers = dict.fromkeys(self.servers, self.began_s)
        async with http_client() as client:
            while True:
                await self.series.look(client, self.members, servers)
                await trio.sleep(series.LOOK_S)

    async def _client(
        self, client: httpx.AsyncClient, turn: Turn, number: int, ends_s: float
    ) -> None:
        dice = Random(f"{self.seed} turn {turn.number} client {number}")
        for count in itertools.count():
            if self.now_s >= ends_s:
                return
            wish = ask_of(turn, dice)
            await self._ask_until_served(
                client, wish, f"soak-{turn.number}-{number}-{count}", Random(number)
            )
            await trio.sleep(wish.pause_s)

    async def _ask_until_served(
        self, client: httpx.AsyncClient, wish: Ask, request_id: str, dice: Random
    ) -> None:
        """One request, and again while it is told to come later."""
        first_s = self.now_s
        for attempt in itertools.count():
            answer, outcome = await self._ask(client, wish, f"{request_id}-{attempt}", dice)
            if outcome is not Outcome.BUSY:
                break
            refused_s = self.now_s - first_s
            self.ledger.refused_longest_s = max(self.ledger.refused_longest_s, refused_s)
            await trio.sleep(min(answer.retry_after_s or 1.0, RETRY_S_MAX))

    async def _ask(
        self, client: httpx.AsyncClient, wish: Ask, request_id: str, dice: Random
    ) -> tuple[Answer, Outcome]:
        began_s = self.now_s
        serving = [each for each in self.frontends if each.name in self.balancer.serving]
        frontend = dice.choice(serving or self.frontends[:1])
        whole = self.wholes[wish.question.number]
        answer, known = await ask_in_time(
            client,
            frontend.facts["url"],
            wish.question,
            request_id=request_id,
            is_streamed=wish.is_streamed,
            leaves_after_s=wish.leaves_after_s,
        )
        is_gone = self.gone_s.get(frontend.name, -1.0) >= began_s
        outcome = known or judged(answer, whole, is_gone=is_gone)
        if outcome is Outcome.LEFT and not answer.is_begun_as(whole):
            outcome = Outcome.WRONG
        facts = {
            "request_id": request_id,
            "began_s": round(began_s, 2),
            "ended_s": round(self.now_s, 2),
            "frontend": frontend.name,
            "differs": answer.differences(whole) if outcome is Outcome.WRONG else [],
        }
        self.ledger.add(
            outcome,
            question=wish.question,
            is_streamed=wish.is_streamed,
            answer=answer,
            whole=whole,
            facts=facts,
        )
        return answer, outcome

    def end(self) -> None:
        """Judge what only the whole run tells, and print it."""
        lines, found = self.series.verdict()
        for each in found:
            self.find(each)
        for line, count in error_lines(self.ledger.out).most_common():
            self.find(f"{count} × in the logs at error: {line}")
        allowed_s = max(self.nobody_s.values(), default=0.0) + RECOVERY_S
        refused_s = self.ledger.refused_longest_s
        if refused_s > allowed_s:
            self.find(f"a request was refused for {refused_s:.1f} s, longer than {allowed_s:.1f} s")
        nobody = ", ".join(f"{model} {n:.1f} s" for model, n in self.nobody_s.items())
        told = [
            *self.ledger.table(),
            "held under load:",
            *(f"  {each}" for each in lines),
            f"longest without a worker: {nobody}; longest refused: {refused_s:.1f} s",
        ]
        (self.ledger.out / "verdict.txt").write_text("\n".join([*told, *self.ledger.findings, ""]))
        print(*told, f"drawn in {self.series.draw()}", sep="\n")


async def together(acts: Iterator[Any]) -> None:
    """Do all of them at once."""
    async with trio.open_nursery() as nursery:
        for act in acts:
            nursery.start_soon(act)


def http_client() -> httpx.AsyncClient:
    """One that waits for ever: `asking.py` has the bound, and no proxy is in between."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    return httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)


def known_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Those that this version has."""
    known = {}
    for key, value in settings.items():
        try:
            load_config(environ={}, overrides={key: str(value)})
        except ConfigError:
            continue
        known[key] = value
    return known


@asynccontextmanager
async def open_soak(
    seed: int, *, clients: int, out: Path, settings: dict[str, Any]
) -> AsyncIterator[Soak]:
    """Servers and two frontends, which outlive the turns; all of a cluster with a secret, as `up` makes it."""
    ledger = Ledger(out)
    async with AsyncExitStack() as stack:
        secret = Path(stack.enter_context(TemporaryDirectory(prefix="trinamo-soak-"))) / "secret"
        write_secret(secret)
        etcd = await stack.enter_async_context(open_etcd_server())
        nats = await stack.enter_async_context(open_nats_server())
        common = {
            "security.secret_file": secret,
            "control_plane.etcd.endpoints": etcd.endpoint,
            "event_plane.nats.servers": nats.url,
            "event_plane.nats.token": nats.token,
            "http.port": 0,
            "http.status_port": 0,
            # A ring that is full soon: while it fills, memory grows as if it leaked.
            "traces.requests_max": 256,
            **known_settings(LAME_DUCK),
            **settings,
        }
        soak = Soak(seed, clients, ledger, [Server(etcd), Server(nats)], [], common)
        soak.frontends = [
            Process(name, "frontend", common, out / f"{name}.log", soak.find, soak.servers)
            for name in ("frontend-1", "frontend-2")
        ]
        try:
            await together(each.start for each in soak.frontends)
            yield soak
            await together(each.end for each in soak.frontends)
        finally:
            with trio.CancelScope(shield=True):
                await together(each.close for each in soak.frontends)
