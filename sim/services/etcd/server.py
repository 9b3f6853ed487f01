"""A control store as a host of the world: the memory store behind messages.

`SimulatedEtcd` is the machine: its disk (a `MemoryStore`) outlives the process, which serves any
number of connections over simulated TCP. There is one model of the store, that of
`transports/memory/store.py`; this module adds a process that can die, a clock of its own, and
faults. Whoever wants a plane opens `open_simulated_etcd` of `client.py` on another host.

Faults: `kill`, `power_off`, `pause` and `resume`, `restart` with the disk or without, `refuse` (the
gap between two leaders), `lose_replies` (applied, then no answer), `compact`, `clock.skip`
and `clock.rate` (leases end on the store's clock), and `interceptor.rules` for single messages.

What this module does not do: replicate. A cluster is seen as its clients see it, as one store that
sometimes has no leader.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import attrs
import msgspec
import trio

from trinamo.runtime.errors import CompactedError, TrinamoError
from trinamo.runtime.protocol.streams.codec import Frame
from trinamo.transports.memory.store import MemoryStore

from ...core.world import World
from ..interception import DelayLine, Done, Interceptor
from ..machine_clock import MachineClock
from ..peer import Peer
from ..wire import Answer, Call, NoLeader, Ping, Pong, Refusal, Reply, arguments, encode
from .wire import (
    Changed,
    Compacted,
    Created,
    FromClient,
    FromStore,
    Unwatch,
    WatchFrom,
    decode_from_client,
    encode_changes,
)

__all__ = ["PORT", "WRITES", "SimulatedEtcd"]

PORT: Final = 2379
WRITES: Final = frozenset(
    {"put", "compare_and_put", "delete", "delete_prefix", "grant_lease", "revoke_lease"}
)
_ARGUMENTS: Final = arguments(
    get=tuple[str],
    range=tuple[str],
    put=tuple[str, bytes, int],
    compare_and_put=tuple[str, bytes, int, int],
    delete=tuple[str],
    delete_prefix=tuple[str],
    grant_lease=tuple[float],
    keep_alive=tuple[int],
    revoke_lease=tuple[int],
    status=tuple[()],
)


class SimulatedEtcd:
    """The store's machine. `boot` starts it; needs a `Network` on the same world.

    Args:
        world: Whose host it is.
        name: The host's name.
        port: Where it listens.
        new_store: Makes an empty disk: at first, and whenever one is lost.
    """

    def __init__(
        self,
        world: World,
        *,
        name: str = "etcd",
        port: int = PORT,
        new_store: Callable[[], MemoryStore] = MemoryStore,
    ) -> None:
        self.world = world
        self.name, self.port = name, port
        self.interceptor = Interceptor(world, name)
        self.is_leaderless = False
        self._leader_at_s = 0.0
        self.store_id = 0
        """Counts disks: a store that lost its data is another store."""
        self._connections: list[_Connection] = []
        self._lessor_wakes = trio.lowlevel.ParkingLot()
        self._observation = ExitStack()
        self.clock = MachineClock(world, self._lessor_wakes.unpark_all)
        self._new_store = new_store
        self._put_disk(new_store())

    # --- the machine -----------------------------------------------------------------------------

    def boot(self) -> None:
        """Start the process on what is on the disk; each lease has its full time anew."""
        self._connections = []
        self.interceptor.forget()
        self.store.restart(now=self.clock.now())
        self.world.boot(self.name, self._main)

    def kill(self) -> None:
        """As SIGKILL: what was acknowledged is on the disk, connections are closed by the kernel."""
        self.world.kill(self.name)

    def power_off(self) -> None:
        """The machine is gone without a word: nobody gets a FIN."""
        self.world.power_off(self.name)

    def pause(self) -> None:
        """It takes connections and answers nothing; its clock goes on."""
        self.world.pause(self.name)

    def resume(self) -> None:
        """End what `pause` began. Leases that ended meanwhile end now."""
        self.world.resume(self.name)

    def restart(self, *, keeps_disk: bool = True) -> None:
        """Boot it again after `kill` or `power_off`, with its data or with an empty disk."""
        if not keeps_disk:
            self._put_disk(self._new_store())
        self.boot()

    def _put_disk(self, store: MemoryStore) -> None:
        self.store = store
        self.store_id += 1
        # Lease ids are random in etcd: those of a lost disk name nothing on the next one.
        store.number_leases_from((self.store_id << 32) + 1)
        self._observation.close()
        self._observation.enter_context(store.observe(self._changed))

    # --- faults on what it says ------------------------------------------------------------------

    def refuse(self, for_s: float) -> None:
        """For so long there is no leader: every call is turned away, no lease ends."""
        self.is_leaderless = True
        self._leader_at_s = max(self._leader_at_s, self.world.current_time() + for_s)
        self.world.add_row("leaderless", store=self.name, for_s=for_s)
        self.world.after(for_s, self._elect)

    def _elect(self) -> None:
        if self.world.current_time() < self._leader_at_s:
            return
        self.is_leaderless = False
        # A new leader gives every lease its full time again, as it cannot know what is left.
        self.store.restart(now=self.clock.now())
        self.world.add_row("leader", store=self.name)

    def lose_replies(self, count: int = 1, *, op: str = "") -> None:
        """The next `count` writes (or calls of `op`) take effect, and nobody is told."""
        self.interceptor.lose_replies(count, (op,) if op else WRITES)

    def compact(self) -> None:
        """Forget the history up to now; watches that are behind start over."""
        self.store.compact()
        self._changed()

    # --- the process -----------------------------------------------------------------------------

    async def _main(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_leases, name="lessor")
            nursery.start_soon(partial(trio.serve_tcp, self._serve, self.port), name="listener")

    async def _serve(self, stream: trio.SocketStream) -> None:
        peer_name, _ = await trio.socket.getnameinfo(stream.socket.getpeername(), 0)
        async with trio.open_nursery() as nursery:
            connection = _Connection(self, Peer(stream), peer_name, nursery)
            # The list of this life of the process: the next one has its own.
            connections = self._connections
            connections.append(connection)
            try:
                nursery.start_soon(connection.push_changes, name="watches")
                await connection.peer.run(connection.receive)
                nursery.cancel_scope.cancel()
            finally:
                connections.remove(connection)

    async def _end_leases(self) -> None:
        while True:
            due = self.store.next_expiry
            with trio.move_on_at(self.clock.world_time(due)) as scope:
                await self._lessor_wakes.park()
            if scope.cancelled_caught and not self.is_leaderless:
                # At least `due`: converting between two clocks may round to a moment before it.
                self.store.expire(max(due, self.clock.now()))
            elif scope.cancelled_caught:
                await self._lessor_wakes.park()

    def _changed(self) -> None:
        self._lessor_wakes.unpark_all()
        for connection in self._connections:
            connection.wake()

    def answer(self, call: Call, data: bytes) -> tuple[Reply, bytes]:
        """Do a call, and say what to answer."""
        if self.is_leaderless:
            return NoLeader(call.id), b""
        decoder = _ARGUMENTS.get(call.op)
        if decoder is None:
            return Refusal(call.id, "control_plane", f"no such call: {call.op!r}"), b""
        try:
            result = self._operation(call.op)(*decoder.decode(data))
        except msgspec.DecodeError as error:
            return Refusal(call.id, "control_plane", f"{call.op}: {error}"), b""
        except TrinamoError as error:
            return Refusal(call.id, error.code, error.message), b""
        if call.op in WRITES:
            self.world.note(f"etcd.{call.op}", revision=self.store.revision)
        return Answer(call.id), encode(result)

    def _operation(self, op: str) -> Callable[..., Any]:
        if op == "status":
            return lambda: f"simulated etcd {self.name}, revision {self.store.revision}"
        now = self.clock.now()
        if op == "put":
            return lambda key, value, lease_id: self.store.put(
                key, value, lease_id=lease_id, now=now
            )
        if op == "compare_and_put":
            return partial(self._compare_and_put, now)
        return partial(getattr(self.store, op), now=now)

    def _compare_and_put(
        self, now: float, key: str, value: bytes, mod_revision: int, lease_id: int
    ) -> Any:
        outcome = self.store.compare_and_put(
            key, value, mod_revision=mod_revision, lease_id=lease_id, now=now
        )
        # With the answer goes what is held, so that the client can tell its own write from another's.
        return outcome, self.store.get(key, now=now)


@attrs.define
class _Watch:
    """One watch of one connection: where it is in the store's history."""

    prefix: str
    next_revision: int
    is_announced: bool = False


class _Connection:
    """One client, as the process sees it."""

    def __init__(
        self, etcd: SimulatedEtcd, peer: Peer, peer_name: str, nursery: trio.Nursery
    ) -> None:
        self.peer = peer
        self._etcd, self._peer_name = etcd, peer_name
        self._requests, self._replies = DelayLine(nursery), DelayLine(nursery)
        self._watches: dict[int, _Watch] = {}
        self._is_stirred = False
        self._stir = trio.lowlevel.ParkingLot()

    def wake(self) -> None:
        """There may be something to push."""
        self._is_stirred = True
        self._stir.unpark_all()

    def receive(self, frame: Frame) -> None:
        """Take one frame in; calls pass the interceptor first."""
        header, data = frame
        message = decode_from_client(header)
        if isinstance(message, Ping):
            self.peer.post(encode(Pong()))
            return
        self._etcd.interceptor.admit(
            self._requests,
            lambda: self._do(message, data),
            channel="etcd.request",
            peer=self._peer_name,
            payload=message,
            size=len(header) + len(data),
        )

    def _do(self, message: FromClient, data: bytes) -> None:
        if isinstance(message, Call):
            reply, result = self._etcd.answer(message, data)
            self._reply(reply, result, payload=Done(message.op, reply))
        elif isinstance(message, WatchFrom):
            self._watches[message.id] = _Watch(message.prefix, message.revision)
            self.wake()
        elif isinstance(message, Unwatch):
            self._watches.pop(message.id, None)

    def _reply(self, reply: FromStore, data: bytes = b"", *, payload: Any = None) -> None:
        header = encode(reply)
        self._etcd.interceptor.admit(
            self._replies,
            lambda: self.peer.post(header, data),
            channel="etcd.reply",
            peer=self._peer_name,
            payload=reply if payload is None else payload,
            size=len(header) + len(data),
        )

    async def push_changes(self) -> None:
        """Send what the watches wait for, as fast as the client takes it."""
        while True:
            self._is_stirred = False
            for watch_id, watch in list(self._watches.items()):
                # A round may wait for room; the watch may be gone when its turn comes.
                while self._watches.get(watch_id) is watch and self._push(watch_id, watch):
                    await self.peer.wait_room()
            if not self._is_stirred:
                await self._stir.park()

    def _push(self, watch_id: int, watch: _Watch) -> bool:
        """Send one batch; whether there was any."""
        store = self._etcd.store
        if self._etcd.is_leaderless:
            return False
        if not watch.is_announced:
            watch.is_announced = True
            self._reply(Created(watch_id, self._etcd.store_id, store.revision))
        asked = watch.next_revision
        try:
            changes, watch.next_revision = store.changes(
                watch.prefix, start_revision=asked, now=self._etcd.clock.now()
            )
        except CompactedError:
            del self._watches[watch_id]
            self._reply(Compacted(watch_id))
            return False
        if changes:
            self._reply(Changed(watch_id, watch.next_revision), encode_changes(list(changes)))
        return watch.next_revision > asked
