"""Blocks that a process was writing when it died, hung or left: free when that is proven."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from tests.needs import needs_library_of, needs_nixl_that_ends
from tests.runtime.kv.ranges import memory_of
from tests.transports.borrower import BLOCKS, open_engine
from trinamo.runtime.kv.pool import BlockPool
from trinamo.runtime.kv.transfer.engine import EngineTransfers
from trinamo.runtime.kv.transfer.settlement import Grant
from trinamo.runtime.protocol.transfer.settlement import InquiryResult, decode_peer
from trinamo.transports.tcp import open_transfer_plane

ROOT = Path(__file__).parents[2]
SHARE = BLOCKS // 4


@attrs.frozen
class Borrower:
    """A process that we grant blocks to."""

    process: subprocess.Popen[str]

    @contextmanager
    @staticmethod
    def running(backend: str, port: int = 0) -> Iterator[Borrower]:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.transports.borrower"),
                json.dumps({"backend": backend, "port": port}),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        try:
            yield Borrower(process)
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()

    async def descriptor(self) -> bytes:
        """What it says of itself, once it runs."""
        assert self.process.stdout is not None
        line = await trio.to_thread.run_sync(self.process.stdout.readline)
        return bytes.fromhex(json.loads(line)["descriptor"])

    def tell(self, do: str, **fields: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self.process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        """Send it; returns when it has taken effect."""
        os.kill(self.process.pid, number)
        if number is signal.SIGKILL:
            self.process.wait()
        elif number is signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)


@attrs.frozen
class Owner:
    """Us."""

    transfers: EngineTransfers

    @property
    def pool(self) -> BlockPool:
        return self.transfers.kv.pool

    async def lend(self, borrower: Borrower, writer: bytes) -> Grant:
        """Grant blocks to a process; returns when it has written some of them, and not all."""
        blocks = self.pool.take(SHARE)
        assert blocks is not None
        view = memory_of(self.transfers.kv).view
        view[:, :, blocks] = 0
        transfers, peer = self.transfers, decode_peer(writer)
        with trio.fail_after(120):
            # A busy machine may take longer than one probe waits.
            while not await transfers.leases.meet(peer):
                pass
        ranges = transfers.kv.memory.range_ids(blocks)
        grant = transfers.leases.grant(transfers.memory, ranges, peer)
        metadata = self.transfers.metadata().hex()
        borrower.tell("write", metadata=metadata, blocks=blocks, ticket=grant.ticket)
        await until(lambda: bool(view[:, :, blocks[0]].any()))
        assert not view[:, :, blocks[-1]].any(), "it was over before it could be struck"
        assert await self.ask(writer, grant.ticket) is InquiryResult.SAYS_MOVING
        return grant

    async def ask(self, writer: bytes, ticket: int) -> InquiryResult:
        """What a process says of a ticket now."""
        inquiries, whom = self.transfers.leases._inquiries, decode_peer(writer)
        assert inquiries is not None
        found = await inquiries.plane.inquire(whom.address, whom.incarnation, ticket, timeout_s=60)
        return found.result

    def withdraw(self, grant: Grant) -> None:
        grant.withdraw()
        self.pool.give_back(grant.blocks)

    def is_quarantined(self, grant: Grant) -> bool:
        return all(block in self.pool._quarantined for block in grant.blocks)

    async def freed(self, grant: Grant) -> None:
        """Return once the blocks can be used again; never quarantined on the way."""
        while not grant.is_settled:
            assert not self.is_quarantined(grant)
            await trio.sleep(0.005)


async def until(is_true: Callable[[], bool], timeout_s: float = 120) -> None:
    with trio.fail_after(timeout_s):
        while not is_true():
            await trio.sleep(0.002)


async def freeze_and_kill(owner: Owner, borrower: Borrower) -> None:
    """Stopped, it costs its blocks until it goes on; stopped again, until it is killed."""
    writer = await borrower.descriptor()
    for number in (signal.SIGCONT, signal.SIGKILL):
        grant = await owner.lend(borrower, writer)
        borrower.send(signal.SIGSTOP)
        owner.withdraw(grant)
        await until(lambda g=grant: owner.is_quarantined(g))  # type: ignore[misc]
        await trio.sleep(0.7)
        assert owner.is_quarantined(grant)
        assert not grant.is_settled
        borrower.send(number)
        await until(lambda g=grant: not owner.is_quarantined(g))  # type: ignore[misc]
        assert grant.is_settled


async def kill_and_replace(owner: Owner, first: Borrower, held: ExitStack, backend: str) -> None:
    """Killed, replaced at its address, and ended in order: each is the end of an incarnation."""
    writer = await first.descriptor()
    refused, replaced = await owner.lend(first, writer), await owner.lend(first, writer)
    first.send(signal.SIGKILL)
    owner.withdraw(refused)
    await owner.freed(refused)
    port = int(decode_peer(writer).address.rpartition(":")[2])
    second = held.enter_context(Borrower.running(backend, port))
    next_writer = await second.descriptor()
    owner.withdraw(replaced)
    await owner.freed(replaced)
    grant = await owner.lend(second, next_writer)
    second.tell("leave")
    owner.withdraw(grant)
    await until(lambda: grant.is_settled)
    assert await trio.to_thread.run_sync(second.process.wait) == 0


@pytest.mark.parametrize("backend", ["nixl cma", "nixl tcp", "mooncake tcp"])
async def test_blocks_are_free_when_it_is_proven_that_nobody_writes_them(backend: str) -> None:
    needs_library_of(backend)
    if backend.startswith("nixl"):
        needs_nixl_that_ends()
    patience: dict[str, Any] = {"quarantine_after_s": 10, "probe_timeout_s": 6}
    with ExitStack() as held:
        frozen = held.enter_context(Borrower.running(backend))
        killed = held.enter_context(Borrower.running(backend))
        async with open_engine(backend, "owner", **patience) as (transfers, _, metrics):
            owner = Owner(transfers)
            with trio.fail_after(120):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(freeze_and_kill, owner, frozen)
                    nursery.start_soon(kill_and_replace, owner, killed, held, backend)
                await until(lambda: owner.pool.free_count == BLOCKS)
            assert owner.pool.quarantined_count == metrics.quarantined_count == 0
            assert metrics.value("trinamo_readmitted_blocks_total") >= 2 * SHARE
            # What was freed is ours alone: nobody writes it any more.
            memory_of(transfers.kv).view[:] = 0
            await trio.sleep(0.3)
            assert not memory_of(transfers.kv).view.any()


@contextmanager
def leaving(backend: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.transports.leaver", backend],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("backend", ["nixl tcp", "mooncake tcp"])
async def test_a_process_whose_backend_is_stuck_is_not_taken_for_dead_until_it_is(
    backend: str,
) -> None:
    """It has closed all in order; the library may still send what it was given."""
    needs_library_of(backend)
    with leaving(backend) as process:
        async with open_transfer_plane() as plane:
            assert process.stdout is not None
            with trio.fail_after(120):
                said = json.loads(await trio.to_thread.run_sync(process.stdout.readline))
                where = said["address"], said["incarnation"], 7
                first = await plane.mover.inquire(*where, timeout_s=6)
                process.kill()
                # Nobody else would: it stands still, and its parent is dead.
                os.kill(said["peer"], signal.SIGKILL)
                assert first.result is InquiryResult.SILENT
                process.wait()
                assert (
                    await plane.mover.inquire(*where, timeout_s=60)
                ).result is InquiryResult.REFUSED
