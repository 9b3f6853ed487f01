"""The tasks beside the books of `watches.py`: one keeps the Watch stream, each watcher reads its own iterator.

They only wait: for the stream, for its silence, for the pause before the next one.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Self

import trio

from trinamo.runtime.errors import DeadlineError, OverloadedError, TransportError, TrinamoError
from trinamo.runtime.planes import Snapshot, WatchEvent

from . import wire_pb2 as wire
from .client import EtcdClient
from .rpc import Stream, StreamLostError, is_too_large
from .watches import Watch, WatchPhase, WatchTable

PAUSE_MIN_S: Final = 0.05
PAUSE_MAX_S: Final = 1.0
PROOF_S: Final = 2.0
"""From the first answer on a stream until watches without a proof of their history are listed. etcd tells old changes
within some tenths of a second; one that needs longer costs a listing more."""

# What an outage looks like to a call; a watch waits for its end.
_OUTAGE: Final = (TransportError, DeadlineError, OverloadedError)


class WatchKeeper:
    """Owns the Watch stream: opens it when there is a watch, and again whenever it is lost.

    Args:
        client: Where the stream and the lists come from.
        table: The books.
        silence_s: A stream that says nothing for this long, even when asked, is given up. A
            server that hangs, or a link that swallows packets, would not end it by itself.
    """

    def __init__(self, client: EtcdClient, table: WatchTable, *, silence_s: float) -> None:
        self.table = table
        self._client = client
        self._silence_s = silence_s
        self._stream: Stream | None = None
        self._wanted = trio.lowlevel.ParkingLot()

    def want(self) -> None:
        """There is a watch, or one has something to say to the server."""
        self._wanted.unpark_all()
        self.flush()

    def flush(self) -> None:
        """Send what the books want sent; does nothing while there is no stream."""
        if self._stream is None:
            return
        try:
            self._stream.send_nowait(*self.table.take_requests())
        except StreamLostError:
            # The keeper learns of it from the stream's end, and the books keep no debts: the
            # next stream starts from the state of every watch.
            self._stream.cancel()

    async def pause(self, pause_s: float) -> None:
        await trio.sleep(self._client.jittered(pause_s))

    async def run(self) -> None:
        pause_s = PAUSE_MIN_S
        while True:
            while not len(self.table):
                await self._wanted.park()
            started = trio.current_time()
            try:
                await self._serve_stream()
            except (StreamLostError, TrinamoError):
                # A stream that has held for a while owes nothing to the pauses before it.
                if trio.current_time() - started > PAUSE_MAX_S:
                    pause_s = PAUSE_MIN_S
                await self.pause(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
            else:
                pause_s = PAUSE_MIN_S

    async def _serve_stream(self) -> None:
        """Run one stream to its end; returns when it is quiet and has no watch left."""
        metadata = await self._client.metadata()
        try:
            async with self._client.channel.open_stream("Watch", metadata=metadata) as stream:
                self._stream = stream
                self.table.connected()
                self.flush()
                try:
                    await self._take_replies(stream)
                finally:
                    self._stream = None
                    self.table.disconnected()
        except StreamLostError as lost:
            self._client.lost_stream(str(lost))
            if lost.cause is not None and is_too_large(lost.cause):
                # The change that cannot be read would come again; a listing passes its key over.
                self.table.list_all()
            # Whatever ended it, the token may be the reason: servers forget tokens when they
            # restart, and a refused watch does not always say why.
            if metadata:
                await self._client.authenticate(stale_token=metadata[0][1])
            raise

    async def _take_replies(self, stream: Stream) -> None:
        is_asked = False
        proofs_end_at = None
        while True:
            replies: Sequence[wire.WatchResponse] = ()
            # Asked for the last third only: an answer takes no seconds, and who asks less costs less.
            with trio.move_on_after(self._silence_s * (1 / 3 if is_asked else 2 / 3)) as scope:
                if proofs_end_at is not None:
                    scope.deadline = min(scope.deadline, proofs_end_at)
                replies = await stream.receive()
            if proofs_end_at is None and replies:
                proofs_end_at = trio.current_time() + PROOF_S
            if proofs_end_at is not None and trio.current_time() >= proofs_end_at:
                proofs_end_at = math.inf
                self.table.end_proofs()
                self.flush()
                if not replies:
                    continue
            if replies:
                is_asked = False
                self._client.heard()
                if not all(self.table.receive(reply) for reply in replies):
                    raise StreamLostError("a watch was refused")
            elif is_asked:
                raise StreamLostError(f"silent for {self._silence_s} s")
            elif not len(self.table):
                return
            else:
                is_asked = True
                self.table.probe()
            self.flush()


class WatchReader:
    """The iterator of one watch; see `ControlPlane.watch`."""

    def __init__(
        self,
        keeper: WatchKeeper,
        prefix: str,
        list_prefix: Callable[[str], Awaitable[Snapshot]],
    ) -> None:
        self._keeper = keeper
        self._list_prefix = list_prefix
        self._waiting = trio.lowlevel.ParkingLot()
        self._watch: Watch = keeper.table.add(prefix, self._waiting.unpark_all)

    def close(self) -> None:
        """Stop watching; no checkpoint."""
        self._keeper.table.remove(self._watch)
        self._keeper.flush()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchEvent:
        # An event is taken only after the last checkpoint, so a cancelled wait loses none.
        await trio.lowlevel.checkpoint()
        while True:
            event = self._keeper.table.take(self._watch)
            if event is not None:
                self._keeper.flush()
                return event
            if self._watch.error is not None:
                raise self._watch.error
            if self._watch.phase is WatchPhase.LISTING:
                await self._list()
            else:
                await self._waiting.park()

    async def _list(self) -> None:
        pause_s = PAUSE_MIN_S
        snapshot = None
        while snapshot is None:
            try:
                snapshot = await self._list_prefix(self._watch.prefix)
            except _OUTAGE as error:
                # A call that ran into its deadline has waited long enough.
                await self._keeper.pause(0.0 if isinstance(error, DeadlineError) else pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
        self._keeper.table.listed(self._watch, snapshot)
        self._keeper.want()
