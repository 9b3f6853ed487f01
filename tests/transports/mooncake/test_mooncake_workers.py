"""The threads that call Mooncake: one thing that fails is that thing's failure; their end is bounded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import TransferError, TrinamoError
from trinamo.transports.mooncake import plane as plane_module
from trinamo.transports.mooncake.engine import Engine, MooncakeOptions
from trinamo.transports.mooncake.plane import open_mooncake_plane
from trinamo.transports.mooncake.workers import Workers


@attrs.define(eq=False)
class Job:
    """Takes no step, or what `step` does."""

    step: Callable[[], None] = lambda: None
    incarnation: str = "aa"
    slot: int = 0
    is_small: bool = False
    error: TrinamoError | None = None
    done: trio.Event = attrs.field(factory=trio.Event)

    @property
    def steps(self) -> Any:
        job = self

        class Steps:
            def __iter__(self) -> Iterator[None]:
                job.step()
                return iter(())

            def close(self) -> None:
                raise OSError("not even that")

        return Steps()

    def fail(self, error: TrinamoError) -> None: ...

    def finish(self, error: TrinamoError | None) -> None:
        self.error = error
        self.done.set()


class Library:
    """The binding, of which notifications may be unreadable."""

    def __init__(self) -> None:
        self.notes: list[Any] = []
        self.problem: Exception | None = None

    def get_notifies(self) -> list[Any]:
        if self.problem is not None:
            raise self.problem
        notes, self.notes = self.notes, []
        return notes

    def register_memory(self, address: int, length: int) -> int:
        return 0

    def unregister_memory(self, address: int) -> int:
        return 0


class Unreadable:
    """What a peer has named by bytes that are no text."""

    @property
    def name(self) -> str:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    msg = "AAAA"


def engine_over(library: Library) -> Engine:
    return Engine(None, library, "127.0.0.1:1", timeout_s=5)


async def eventually(is_true: Callable[[], bool]) -> None:
    with trio.fail_after(120):
        while not is_true():
            await trio.sleep(0.001)


async def test_notifications_that_cannot_be_taken_end_nothing() -> None:
    library, heard = Library(), list[Any]()
    workers: Any = Workers(
        engine_over(library),
        4096,
        "ours",
        threads=1,
        poll_s=0.001,
        on_told=heard.extend,
        on_left=lambda *_: None,
    )
    workers.start()
    library.problem = RuntimeError("odd")
    await eventually(lambda: workers.unheard_count > 3)
    library.problem = None
    library.notes = [
        Unreadable(),
        SimpleNamespace(name="p", msg=None),
        SimpleNamespace(name="p", msg="no base64!"),
        SimpleNamespace(name="p", msg="d29yZA=="),
    ]
    await eventually(lambda: heard == [("p", b"word")])

    def fail() -> None:
        raise ValueError("odd")

    for job in (Job(fail), Job(fail), Job()):
        workers.submit(job)
        with trio.fail_after(120):
            await job.done.wait()
        assert isinstance(job.error, TransferError) is (job.step is fail)
    workers.stop()
    await trio.to_thread.run_sync(workers.join)


async def test_a_peer_that_hangs_holds_up_nobody_else() -> None:
    """A call to it keeps its thread for seconds: it has all of them but one, however many wait."""
    gate, stuck = threading.Event(), threading.Semaphore(0)

    def stick() -> None:
        stuck.release()
        gate.wait()

    workers: Any = Workers(
        *(engine_over(Library()), 4096, "ours"),
        threads=3,
        poll_s=0.01,
        on_told=lambda _: None,
        on_left=lambda *_: None,
    )
    workers.start()
    hung = [Job(stick, "hung") for _ in range(12)]
    for job in hung:
        workers.submit(job)
    for _ in range(2):
        await trio.to_thread.run_sync(stuck.acquire)
    try:
        for number in range(3):
            job = Job(incarnation=f"healthy-{number}")
            workers.submit(job)
            with trio.fail_after(120):
                await job.done.wait()
        assert not any(job.done.is_set() for job in hung)
    finally:
        gate.set()
        workers.stop()
    await trio.to_thread.run_sync(workers.join)
    with trio.fail_after(120):
        for job in hung:
            await job.done.wait()


async def test_closing_is_bounded_once_however_many_threads_are_stuck(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """It took the bound once for each thread, in a shield that no cancellation reaches."""
    gate, all_stuck = threading.Event(), threading.Barrier(9)

    def stick() -> None:
        all_stuck.wait()
        gate.wait()

    options = MooncakeOptions(threads=8, drain_s=100)
    monkeypatch.setattr(plane_module, "choose_path", lambda *_: "tcp")
    async with open_mooncake_plane(options, RealEnv(), engine=engine_over(Library())) as plane:
        library: Any = plane.mover._library
        for number in range(8):
            library._workers.submit(Job(stick, f"peer-{number}"))
        await trio.to_thread.run_sync(all_stuck.wait)
        before = trio.current_time()
    assert trio.current_time() - before == pytest.approx(100)
    assert plane.mover.is_left_moving
    gate.set()


@pytest.mark.parametrize(("forced", "device"), [("1", ""), (None, "mlx5_0")])
def test_an_engine_that_is_forced_to_tcp_gets_no_rdma_device(
    monkeypatch: pytest.MonkeyPatch, forced: str | None, device: str
) -> None:
    seen: list[tuple[Any, ...]] = []

    class TransferEngine:
        def initialize(self, *args: Any) -> int:
            seen.append(args)
            return 0

        def get_rpc_port(self) -> int:
            return 7

    from trinamo.transports.mooncake import engine as engine_module

    library = SimpleNamespace(TransferEngine=TransferEngine)
    monkeypatch.setattr(engine_module, "import_library", lambda: library)
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    if forced is not None:
        monkeypatch.setenv("MC_FORCE_TCP", forced)
    path = "tcp" if forced else "rdma"
    if forced is None:
        monkeypatch.setattr(engine_module, "choose_path", lambda *_: "rdma")
    engine_module.make_engine(MooncakeOptions(protocol="rdma", device="mlx5_0"))
    assert seen == [("127.0.0.1", "P2PHANDSHAKE", path, device)]
