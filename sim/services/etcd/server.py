"""A control store as a host of the world: the memory store behind etcd's own messages.

`SimulatedEtcd` is the machine: its disk (a `MemoryStore`) outlives the process, which serves any
number of connections over simulated TCP. There is one model of the store, that of
`transports/memory/store.py`; this module adds a process that can die, a clock of its own, and
faults. Methods are in `methods.py`, watches in `watches.py`. Whoever wants a plane opens
`open_simulated_etcd` of `channel.py` on another host.

Faults: `kill`, `power_off`, `pause` and `resume`, `restart` with the disk or without, `restore`, `refuse` (the
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

import trio

from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.protocol.streams.codec import Frame
from trinamo.transports.etcd.rpc import METHODS
from trinamo.transports.memory.store import MemoryStore

from ...core.world import World
from ..interception import DelayLine, Done
from ..machine import ServiceMachine
from ..peer import StreamPeer
from .methods import Methods, refusal
from .watches import WatchStream
from .wire import Call, CallResult, Forget, Heartbeat, Pong, Refusal, Reply, encode, reader

PORT: Final = 2379
WRITES: Final = frozenset({"Put", "Txn", "DeleteRange", "LeaseGrant", "LeaseRevoke"})
PROGRESS_S: Final = 60.0
NO_LEADER: Final = ("UNAVAILABLE", "etcdserver: no leader")
_read = reader(Call | Forget | Heartbeat)


class SimulatedEtcd(ServiceMachine):
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
        self._lessor_wakes = trio.lowlevel.ParkingLot()
        super().__init__(world, name, on_clock=self._lessor_wakes.unpark_all, losable=WRITES)
        self.port = port
        self.store_id = 0
        """Counts disks: a store that lost its data is another store."""
        self._connections: list[_Connection] = []
        self._observation = ExitStack()
        self._new_store = new_store
        self._put_disk(new_store())

    # --- the machine -----------------------------------------------------------------------------

    def boot(self) -> None:
        """Start the process on what is on the disk; each lease has its full time anew."""
        self._connections = []
        self.interceptor.forget()
        self.store.restart(now=self.clock.now())
        self.world.boot(self.name, self._main)

    def _empty_disk(self) -> None:
        self._put_disk(self._new_store())

    def _put_disk(self, store: MemoryStore) -> None:
        self.store = store
        self.store_id += 1
        # Lease ids are random in etcd: those of a lost disk name nothing on the next one.
        store.number_leases_from((self.store_id << 32) + 1)
        self._observation.close()
        self._observation.enter_context(store.observe(self._changed))

    def _elected(self) -> None:
        # A new leader gives every lease its full time again, as it cannot know what is left.
        self.store.restart(now=self.clock.now())

    def back_up(self) -> MemoryStore:
        """What is on the disk now, for `restore`."""
        backup = self._new_store()
        backup.load(self.store)
        return backup

    def restore(self, backup: MemoryStore) -> None:
        """Kill the process if it runs, and start it on the backup: what was written since is gone."""
        if self.world.host(self.name).is_running:
            self.kill()
        self._empty_disk()
        self.store.load(backup)
        self.boot()

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
            connection = _Connection(self, stream, peer_name, nursery)
            # The list of this life of the process: the next one has its own.
            connections = self._connections
            connections.append(connection)
            try:
                nursery.start_soon(connection.push_changes, name="watches")
                nursery.start_soon(connection.tell_progress, name="progress")
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
            return Refusal(call.id, *NO_LEADER), b""
        request = METHODS[call.op].request.FromString(data)
        try:
            reply = Methods(self.store, self.store_id, self.clock.now()).answer(call.op, request)
        except TrinamoError as error:
            return Refusal(call.id, *refusal(error)), b""
        if call.op in WRITES:
            self.world.note(f"etcd.{call.op}", revision=self.store.revision)
        return CallResult(call.id), reply.SerializeToString()


class _Connection:
    """One client, as the process sees it. All it says and hears but pings passes the interceptor."""

    def __init__(
        self, etcd: SimulatedEtcd, stream: trio.SocketStream, client: str, nursery: trio.Nursery
    ) -> None:
        self.peer, self.client = StreamPeer(stream), client
        self._etcd = etcd
        self._requests, self._replies = DelayLine(nursery), DelayLine(nursery)
        self._streams: dict[int, WatchStream] = {}
        self._is_stirred = False
        self._stir = trio.lowlevel.ParkingLot()

    def wake(self) -> None:
        """There may be something to push."""
        self._is_stirred = True
        self._stir.unpark_all()

    def receive(self, frame: Frame) -> None:
        """Take one frame in."""
        header, data = frame
        message = _read(header)
        if isinstance(message, Heartbeat):
            self.peer.post(encode(Pong()))
            return
        self._etcd.interceptor.admit(
            self._requests,
            lambda: self._do(message, data),
            channel="etcd.request",
            peer=self.client,
            payload=message,
            size=len(header) + len(data),
        )

    def _do(self, message: Call | Forget, data: bytes) -> None:
        if isinstance(message, Forget):
            self._streams.pop(message.id, None)
        elif message.op == "Watch":
            stream = self._streams.get(message.id)
            if stream is None:
                stream = self._streams[message.id] = WatchStream(self._etcd.world.choices)
            self._watch(message, METHODS["Watch"].request.FromString(data), stream)
        else:
            reply, result = self._etcd.answer(message, data)
            self._reply(reply, result, payload=Done(message.op, reply))

    def _watch(self, call: Call, request: Any, stream: WatchStream) -> None:
        etcd = self._etcd
        answer = stream.take(request, etcd.store, etcd.store_id)
        self._reply(CallResult(call.id), answer.SerializeToString(), payload=answer)
        wanted = request.create_request
        if wanted.range_end:  # Else it is a probe.
            etcd.world.note("etcd.watch", client=self.client)
        if wanted.start_revision and wanted.start_revision <= etcd.store.revision:
            self.wake()

    def _reply(self, reply: Reply, data: bytes, *, payload: Any) -> None:
        header = encode(reply)
        self._etcd.interceptor.admit(
            self._replies,
            lambda: self.peer.post(header, data),
            channel="etcd.reply",
            peer=self.client,
            payload=payload,
            size=len(header) + len(data),
        )

    async def push_changes(self) -> None:
        """Send what the watches wait for, as fast as the client takes it."""
        etcd = self._etcd
        while True:
            self._is_stirred = False
            for call_id, stream in list(self._streams.items()):
                for message in stream.pending(etcd.store, etcd.store_id, etcd.clock.now()):
                    # A round may wait for room; the stream may be gone when its turn comes.
                    if self._streams.get(call_id) is not stream:
                        break
                    self._reply(CallResult(call_id), message.SerializeToString(), payload=message)
                    await self.peer.wait_room()
            if not self._is_stirred:
                await self._stir.park()

    async def tell_progress(self) -> None:
        """Now and then, tell watches that nothing has happened how far they are."""
        while True:
            await trio.sleep(PROGRESS_S)
            for stream in self._streams.values():
                stream.is_progress_due = True
            self.wake()
