"""Everything restarted in turn under load, behind HAProxy as its page has it: no client notices.

Two machines, each with a frontend, a worker with an exact engine and one before an upstream; a third with etcd and
NATS, which are restarted, too, as the upstreams are.
Clients come by the page's proxy, and by a balancer of connections, as a service of Kubernetes is one.
"""

from __future__ import annotations

import csv
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import attrs
import httpx
import pytest
import trio
import yaml

from tests import needs
from tests.certificates import Authority
from tests.cluster.processes import Member, start, until
from tests.machines.machines import Machine, open_machines
from tests.machines.proxies import HOST, PROXIES, proxied
from tests.machines.servers import open_servers
from tests.machines.site import CONFIG, ETCD, HTTP, NATS, TOKEN
from tests.soak.asking import Answer, Outcome, ask, ask_in_time, judged
from tests.soak.census import gauge
from tests.soak.plan import Question
from tests.transports.openai.fake import (
    STREAM_HEAD,
    Asked,
    FakeUpstream,
    chat_chunk,
    chunk,
    events,
    whole,
)
from trinamo.cli.up.certs import write_secret
from trinamo.transports.servers import EmbeddedServer
from trinamo.transports.servers.binaries import free_port

pytestmark = [
    needs.HAPROXY.unless(needs.HAPROXY.is_command()),
    # httpx leaves generators of its own to the garbage collector when a stream is left.
    pytest.mark.filterwarnings("ignore:.*(httpx|httpcore|Response.aiter).*"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

(PROXY,) = (each for each in PROXIES if each.name == "haproxy")
KEY: Final = "a-key-of-some-length"
WORD_S: Final = 0.02
SHORT, MIDDLE, LONG = 25, 1250, 2000
"""Words of an answer: of half a second, of longer than a worker takes to leave, and than a frontend does."""
DRAIN_S: Final = 15
"""Of workers and frontends; a short answer is through long before, whichever process stalls."""
LAME_DUCK_S: Final = 15
LONGS: Final = 4
"""Of each model, streamed and whole in turns, over both frontends."""
EXACT, UPSTREAM = "exact", "up"
ENGINE: Final = f"""
import time
from contextlib import asynccontextmanager
from pathlib import Path

import trinamo
from trinamo.runtime.engines.exact.engine import ExactEngine

class Paced(ExactEngine):
    def step(self, items):
        time.sleep({WORD_S} * Path(__file__).with_name("paced").exists())
        return super().step(items)

@trinamo.engine(name="{EXACT}")
@asynccontextmanager
async def engine():
    async with trinamo.open_engine_host(Paced()) as host:
        yield host
"""
# Beside the page's block: what the proxy counts, and a balancer that knows connections alone.
BESIDE: Final = """
listen counts
    bind 127.0.0.1:{counts}
    stats enable
    stats uri /

listen service
    mode tcp
    no option http-no-delay
    bind 127.0.0.1:{service}
    balance roundrobin
    option httpchk GET /health
    server one {one} check inter 1s fall 1 rise 1
    server two {two} check inter 1s fall 1 rise 1
"""


def question(model: str, words: int) -> Question:
    body = {"model": model, "max_tokens": words, "temperature": 0}
    messages = [{"role": "user", "content": f"{model} says {words}"}]
    return Question(words, "chat/completions", {**body, "messages": messages})


@attrs.frozen
class Long:
    """What became of a long answer."""

    model: str
    is_streamed: bool
    outcome: Outcome


Ended: TypeAlias = Counter[Long]


@attrs.define(eq=False)
class Upstream:
    """A server of somebody else, which says so many words as it is asked for, at a steady pace."""

    host: str
    port: int = attrs.field(factory=free_port)
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}/v1"

    async def start(self, nursery: trio.Nursery) -> None:
        fake = FakeUpstream(self.port, _say)
        fake.models = [{"id": UPSTREAM, "max_model_len": 4096}]
        self._scope = trio.CancelScope()
        await nursery.start(self._serve, fake)

    async def _serve(self, fake: FakeUpstream, *, task_status: Any) -> None:
        with self._scope:
            await trio.serve_tcp(fake.accept, self.port, host=self.host, task_status=task_status)

    def end(self) -> None:
        self._scope.cancel()


async def _say(asked: Asked, stream: Any) -> None:
    body = asked.json
    words = words_of(body["messages"][-1]["content"], body["max_tokens"])
    usage = {"prompt_tokens": 3, "completion_tokens": len(words), "total_tokens": 3 + len(words)}
    if not body.get("stream"):
        await trio.sleep(WORD_S * len(words))
        message = {"role": "assistant", "content": "".join(words)}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        await stream.send_all(whole({"id": "up", "choices": [choice], "usage": usage}))
        return
    await stream.send_all(STREAM_HEAD)
    for each in words:
        await stream.send_all(chunk(events(chat_chunk(each), done=False)))
        await trio.sleep(WORD_S)
    last = events(chat_chunk(finish="length"), {"id": "up", "choices": [], "usage": usage})
    await stream.send_all(chunk(last) + b"0\r\n\r\n")


def words_of(prompt: str, count: int) -> list[str]:
    return [f"{prompt}, {each} " for each in range(count)]


@attrs.define(eq=False)
class Site:
    """What runs, and what became of every answer."""

    folder: Path
    nursery: trio.Nursery
    machines: Sequence[Machine]
    """Where the first and the second of everything is."""
    servers: Sequence[EmbeddedServer]
    clients: dict[str, httpx.AsyncClient]
    """By the way that they come."""
    counts_url: str
    settings: dict[str, Any]
    frontends: list[Member] = attrs.field(factory=list)
    workers: list[Member] = attrs.field(factory=list)
    upstreams: list[Upstream] = attrs.field(factory=list)
    wholes: dict[tuple[str, int], Answer] = attrs.field(factory=dict)
    right: Counter[tuple[str, str, bool]] = attrs.field(factory=Counter)
    """Short answers that came whole, by way, model and whether they were streamed."""
    bad: list[str] = attrs.field(factory=list)
    """Short answers that did not come whole, and what was said instead."""

    async def start(self, number: int, role: str, **more: Any) -> Member:
        machine = self.machines[number % 2]
        own = {"data_plane.tcp.host": machine.address, "http.host": machine.address}
        settings = self.settings | own | {key.replace("__", "."): more[key] for key in more}
        log = self.folder / f"{role}-{number}.log"
        return await start(role, settings, log, launcher=machine.command([]))

    async def start_frontend(self, number: int) -> Member:
        return await self.start(number, "frontend", http__port=HTTP)

    async def start_worker(self, number: int) -> Member:
        """The first two are exact, the others stand before an upstream each."""
        if number < 2:
            more = {"worker__engine": f"{self.folder}/paced.py:engine"}
        else:
            more = {
                "worker__engine": "openai",
                "worker__upstream__url": self.upstreams[number - 2].url,
            }
        return await self.start(number, "worker", **more)

    async def start_all(self) -> None:
        async def take(members: dict[int, Member], number: int, start: Any) -> None:
            members[number] = await start(number)

        workers: dict[int, Member] = {}
        frontends: dict[int, Member] = {}
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(take, workers, number, self.start_worker)
            for number in range(2):
                nursery.start_soon(take, frontends, number, self.start_frontend)
        self.workers = [workers[each] for each in sorted(workers)]
        self.frontends = [frontends[each] for each in sorted(frontends)]

    async def ask(self, way: str, asked: Question, request_id: str, *, is_streamed: bool) -> Answer:
        answer, known = await ask_in_time(
            self.clients[way], "", asked, request_id=request_id, is_streamed=is_streamed
        )
        assert known is None, f"{request_id} hung"
        return answer

    async def learn(self) -> None:
        """The whole answers, while nothing is done to anybody, and as fast as the engine goes."""

        async def take(model: str, words: int) -> None:
            asked = question(model, words)
            answer = Answer()
            # No bound but the test's own: 6,500 tokens take minutes where the machine has other work.
            await ask(
                *(self.clients["HTTP/2"], "", asked),
                request_id="learn",
                is_streamed=False,
                answer=answer,
            )
            assert answer.status == 200, answer
            assert answer.is_ended, answer
            self.wholes[model, words] = answer

        async with trio.open_nursery() as nursery:
            for model in (EXACT, UPSTREAM):
                for words in (SHORT, MIDDLE, LONG):
                    nursery.start_soon(take, model, words)
        (self.folder / "paced").touch()

    async def ask_for_ever(self, way: str, model: str, *, is_streamed: bool) -> None:
        """Short answers, one after the other."""
        asked = question(model, SHORT)
        for number in range(1_000_000):
            request_id = f"{model}-{is_streamed}-{number}"
            answer = await self.ask(way, asked, request_id, is_streamed=is_streamed)
            outcome = judged(answer, self.wholes[model, SHORT])
            if outcome is Outcome.RIGHT:
                self.right[way, model, is_streamed] += 1
            else:
                said = answer.error or answer.broken or answer.status
                self.bad.append(f"{outcome}: {request_id} by {way}: {said}")

    async def begin_long(self, words: int) -> Ended:
        """Have long answers under way; what becomes of them is filled in."""
        ended: Ended = Counter()
        begun: list[Answer] = []

        async def take(model: str, *, is_streamed: bool) -> None:
            answer = Answer()
            begun.append(answer)
            client, asked = self.clients["HTTP/1.1"], question(model, words)
            with trio.fail_after(300):
                await ask(
                    client, "", asked, request_id="long", is_streamed=is_streamed, answer=answer
                )
            ended[Long(model, is_streamed, judged(answer, self.wholes[model, words]))] += 1

        async def have_begun() -> bool:
            return sum(bool(each.text) for each in begun) >= LONGS

        for number in range(2 * LONGS):
            model = (EXACT, UPSTREAM)[number % 2]
            self.nursery.start_soon(partial(take, model, is_streamed=number < LONGS))
        await until(have_begun, "the long answers have begun")
        return ended

    async def wait_balanced(self) -> None:
        """Until both balancers ask both frontends."""

        async def is_so() -> bool:
            servers = [each for each in await self.counts() if each["svname"] in ("one", "two")]
            return len(servers) == 4 and all(each["status"] == "UP" for each in servers)

        await until(is_so, "both frontends are asked")

    async def metric(self, name: str) -> list[float]:
        """The sum of `trinamo_<name>` over its labels, of each frontend."""
        client = self.clients["HTTP/1.1"]
        pages = [await client.get(f"{each.facts['url']}/metrics") for each in self.frontends]
        return [gauge(each.text, [name]) for each in pages]

    async def counts(self) -> list[dict[str, str]]:
        """What the balancers tell of each server."""
        async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
            text = (await client.get(f"{self.counts_url}/;csv")).text
        return list(csv.DictReader(text.removeprefix("# ").splitlines()))


@asynccontextmanager
async def open_site(folder: Path) -> AsyncIterator[Site]:
    """Everything that the page names, in front of two frontends, and what these need.

    Skips the test where this user may make no networks.
    """
    if not needs.can_make_networks():
        needs.NETWORKS.lacking()
    keys = folder / "keys.txt"
    keys.write_text(f"me (operator): {KEY}\n")
    keys.chmod(0o600)
    (folder / "paced.py").write_text(ENGINE)
    write_secret(folder / "cluster.secret")
    authority = Authority.make(folder / "certificates")
    counts, service = free_port(), free_port()
    async with AsyncExitStack() as stack:
        wanted = {"one": 1, "two": 1, "servers": 1}
        *pair, third = stack.enter_context(open_machines(folder, wanted, {})).values()
        servers = [f"{each.address}:{HTTP}" for each in pair]
        more = BESIDE.format(counts=counts, service=service, one=servers[0], two=servers[1])
        addresses: dict[str, str] = dict.fromkeys(("etcd", "nats"), third.address)
        for machine in pair:
            with (machine.etc / "hosts").open("a") as file:
                file.writelines(f"{address} {name}\n" for name, address in addresses.items())
        ran = await stack.enter_async_context(
            open_servers(third, addresses, yaml.safe_load(CONFIG))
        )
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        settings = {
            "control_plane.etcd.endpoints": f"etcd:{ETCD}",
            "event_plane.nats.servers": f"nats://nats:{NATS}",
            "event_plane.nats.token": TOKEN,
            "event_plane.nats.allow_plain_password": True,
            "security.secret_file": folder / "cluster.secret",
            "http.hosts": HOST,
            "http.api_keys_file": keys,
            "http.lame_duck_s": LAME_DUCK_S,
            "http.drain_timeout_s": DRAIN_S,
            "shutdown.drain_timeout_s": DRAIN_S,
        }
        counted = f"http://127.0.0.1:{counts}"
        site = Site(folder, nursery, pair, [*ran.etcd, *ran.nats], {}, counted, settings)
        stack.push_async_callback(_end, site)
        for _ in range(2):
            site.upstreams.append(Upstream(f"{third.address.rpartition('.')[0]}.254"))
            await site.upstreams[-1].start(nursery)
        await site.start_all()
        port = stack.enter_context(proxied(PROXY, servers, authority, folder, more))
        context = ssl.create_default_context(cafile=str(authority.ca_file))
        for way, url in (
            ("HTTP/2", f"https://127.0.0.1:{port}"),
            ("HTTP/1.1", f"https://127.0.0.1:{port}"),
            ("a service", f"http://127.0.0.1:{service}"),
        ):
            client = httpx.AsyncClient(
                base_url=url,
                http2=way == "HTTP/2",
                verify=context,
                timeout=None,
                headers={"host": HOST, "authorization": f"Bearer {KEY}"},
                trust_env=False,
            )
            site.clients[way] = await stack.enter_async_context(client)
        yield site


async def _end(site: Site) -> None:
    with trio.CancelScope(shield=True):
        for each in (*site.frontends, *site.workers):
            each.kill()
            await each.process.wait()


@pytest.mark.timeout(1_800)
async def test_nobody_notices_that_everything_is_restarted(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.wait_balanced()
        await site.learn()
        async with trio.open_nursery() as load:
            for way in site.clients:
                for model in (EXACT, UPSTREAM):
                    for is_streamed in (False, True):
                        load.start_soon(
                            partial(site.ask_for_ever, way, model, is_streamed=is_streamed)
                        )
            over_workers = [await restart_workers(site, number) for number in range(2)]
            migrated = sum(await site.metric("migrations_total"))
            for server in site.servers:
                await server.stop()
                await server.start()
            # What a frontend cuts is not what became of them when their worker left.
            await wait_ended(over_workers)
            over_frontends = [await restart_frontend(site, number) for number in range(2)]
            await wait_ended(over_frontends)
            load.cancel_scope.cancel()
        counts = await site.counts()
    assert site.bad == []
    assert len(site.right) == 12
    assert min(site.right.values()) > 5
    # Neither balancer dialled a frontend that did not listen, or lost a connection in an answer.
    assert {each[fault] for each in counts for fault in ("econ", "eresp", "wretr")} <= {"", "0"}
    check_long(over_workers, over_frontends)
    assert migrated > 0


async def wait_ended(longs: Sequence[Ended]) -> None:
    async def have_ended() -> bool:
        return all(each.total() == 2 * LONGS for each in longs)

    await until(have_ended, "the long answers have ended")


def check_long(over_workers: list[Ended], over_frontends: list[Ended]) -> None:
    """What is longer than a drain goes on elsewhere, or says that it was cut: an event, or a 503 that may be repeated."""
    for ended in over_workers:
        assert {each.outcome for each in ended if each.model == EXACT} == {Outcome.RIGHT}
    found = {each for ended in (*over_workers, *over_frontends) for each in ended}
    assert {each.outcome for each in found if each.is_streamed} == {Outcome.RIGHT, Outcome.TYPED}
    assert {each.outcome for each in found if not each.is_streamed} <= {Outcome.RIGHT, Outcome.BUSY}


async def restart_workers(site: Site, number: int) -> Ended:
    """One of each kind: SIGTERM to the old one, then a new one; so with the upstream."""
    longs = await site.begin_long(MIDDLE)

    async def restart(index: int) -> None:
        assert await site.workers[index].stop() == 0
        if index >= 2:
            site.upstreams[number].end()
            await site.upstreams[number].start(site.nursery)
        site.workers[index] = await site.start_worker(index)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(restart, number)
        nursery.start_soon(restart, number + 2)

    async def are_live() -> bool:
        return await site.metric("live_instances") == [4, 4]

    await until(are_live, "four workers are live")
    return longs


async def restart_frontend(site: Site, number: int) -> Ended:
    """SIGTERM; a new one at the same address; and the wait until the balancers ask it."""
    longs = await site.begin_long(LONG)
    assert await site.frontends[number].stop() == 0
    site.frontends[number] = await site.start_frontend(number)
    await site.wait_balanced()
    return longs
