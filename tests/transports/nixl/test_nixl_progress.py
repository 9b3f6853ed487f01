"""The thread that calls NIXL: one thing that fails is that thing's failure, and nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from trinamo.runtime.errors import DisconnectedError, TransferError, TrinamoError
from trinamo.runtime.protocol.transfer.description import MemoryDescription
from trinamo.transports.nixl.progress import ProgressThread
from trinamo.transports.one_sided.memory import Memory, OneSidedRemote
from trinamo.transports.one_sided.steps import Step, Tell


class Agent:
    """A library in which whatever is named in `broken` raises something unheard of."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.told_waits: dict[str, list[bytes]] = {}
        self.is_done_now = True
        self.looked = threading.Event()

    def _break(self, name: str) -> None:
        if name in self.broken:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, name)

    def told(self) -> dict[str, list[bytes]]:
        self.looked.set()
        self._break("told")
        found, self.told_waits = self.told_waits, {}
        return found

    def tell(self, peer: str, message: bytes) -> None:
        self._break("tell")

    def is_done(self, handle: int) -> bool:
        self._break("is_done")
        return self.is_done_now

    def load(self, metadata: bytes) -> str:
        self._break("load")
        return "aa"

    def post(self, *_: object) -> int:
        self._break("post")
        return 1

    def prepare(self, *_: object, **__: object) -> int:
        return 1

    def connect(self, peer: str) -> None: ...

    def release(self, handle: int) -> None: ...

    def release_list(self, handle: int) -> None: ...

    def unload(self, peer: str) -> None: ...


@attrs.define(eq=False)
class Job:
    """One word to the peer; `wraps` makes more of it."""

    incarnation: str = "aa"
    slot: int = 0
    is_small: bool = False
    error: TrinamoError | None = None
    done: trio.Event = attrs.field(factory=trio.Event)

    @property
    def steps(self) -> Generator[Step, None, None]:
        if self._steps is None:
            self._steps = self._take()
        return self._steps

    _steps: Generator[Step, None, None] | None = None

    def _take(self) -> Generator[Step, None, None]:
        yield Tell(REMOTE, b"word")

    def fail(self, error: TrinamoError) -> None: ...

    def finish(self, error: TrinamoError | None) -> None:
        self.error = error
        self.done.set()


class Reading(Job):
    """A job whose step has to be waited for."""

    def _take(self) -> Generator[Step, None, None]:
        from trinamo.transports.one_sided.steps import ReadPage

        yield ReadPage(REMOTE, 0, 64)


REMOTE = OneSidedRemote(
    description=MemoryDescription(
        backend="nixl",
        incarnation="aa",
        region=1,
        generation=1,
        fingerprint="",
        bases=(4096,),
        length=64,
        block_bytes=64,
    ),
    memory=Memory.at(4096, 64),
    page=8192,
    address=b"there",
)


@attrs.frozen
class House:
    thread: Any
    agent: Any
    heard: list[dict[str, list[bytes]]]

    async def run(self, job: Job) -> TrinamoError | None:
        self.thread.submit(job)
        with trio.fail_after(120):
            await job.done.wait()
        return job.error


@pytest.fixture
async def house() -> AsyncIterator[House]:
    agent: Any = Agent()
    heard: list[dict[str, list[bytes]]] = []
    thread = ProgressThread(
        agent,
        Memory.at(4096, 4096),
        4,
        spins=False,
        notification_poll_s=0.001,
        on_told=heard.append,
    )
    thread.start()
    await thread.call(lambda: thread.connect(REMOTE))
    yield House(thread, agent, heard)
    thread.stop()
    assert await trio.to_thread.run_sync(thread.join, 5.0)


async def eventually(is_true: Callable[[], bool]) -> None:
    with trio.fail_after(120):
        while not is_true():
            await trio.sleep(0.001)


async def test_notifications_that_cannot_be_taken_end_nothing(house: House) -> None:
    """Such as one of a peer whose name is no text; the next ones are heard."""
    house.agent.broken.add("told")
    await eventually(lambda: house.thread.unheard_count > 3)
    assert await house.thread.call(lambda: 7) == 7
    assert await house.run(Job()) is None
    house.agent.broken.clear()
    house.agent.told_waits = {"aa": [b"word"]}
    await eventually(lambda: house.heard == [{"aa": [b"word"]}])


@pytest.mark.parametrize("error", [ValueError("odd"), MemoryError(), RuntimeError("worse")])
async def test_a_call_that_raises_anything_raises_it_where_it_is_waited_for(
    house: House, error: Exception
) -> None:
    def fail() -> None:
        raise error

    with trio.fail_after(120), pytest.raises(TransferError, match=type(error).__name__):
        await house.thread.call(fail)
    house.thread.post(fail)
    assert await house.thread.call(lambda: 7) == 7


@pytest.mark.parametrize(
    ("broken", "job"), [("tell", Job), ("post", Reading), ("is_done", Reading)]
)
async def test_a_step_that_raises_anything_fails_its_own_job(
    house: House, broken: str, job: type[Job]
) -> None:
    house.agent.broken.add(broken)
    assert isinstance(await house.run(job()), TransferError)
    house.agent.broken.clear()
    assert await house.run(job()) is None


async def test_one_transfer_that_cannot_be_looked_at_leaves_the_others_under_way(
    house: House,
) -> None:
    house.agent.is_done_now = False
    first, second = Reading(), Reading()
    house.thread.submit(first)
    house.thread.submit(second)
    await eventually(lambda: not house.thread.is_idle)
    house.agent.broken.add("is_done")
    with trio.fail_after(120):
        await first.done.wait()
        await second.done.wait()
    assert isinstance(first.error, TransferError)
    assert isinstance(second.error, TransferError)


async def test_who_comes_after_the_end_is_told_so(house: House) -> None:
    house.thread.stop()
    await trio.to_thread.run_sync(house.thread.join, 5.0)
    with trio.fail_after(120):
        with pytest.raises(DisconnectedError, match="has ended"):
            await house.thread.call(lambda: 7)
        house.thread.post(lambda: None)
        assert isinstance(await house.run(Job()), DisconnectedError)


async def test_who_waits_when_the_thread_ends_is_told_so(house: House) -> None:
    """Its call stands behind one that takes long, and then there is nobody to take it."""
    gate = threading.Event()
    results: list[str] = []

    async def wait() -> None:
        try:
            await house.thread.call(lambda: results.append("called"))
        except DisconnectedError:
            results.append("told")

    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            house.thread.post(lambda: _wait_for(gate))
            house.thread.stop()
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked(0.01)
            gate.set()
    assert results in (["called"], ["told"])


def _wait_for(gate: threading.Event) -> None:
    gate.wait(5)
