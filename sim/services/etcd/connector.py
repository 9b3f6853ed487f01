"""The client's side of the simulated etcd: one connection, dialled again whenever it is lost.

It gives up a connection on which nothing was heard for `silence_s`, having asked half-way, because
a frozen server or a cut link sends no FIN. Pauses between tries grow and are jittered, so that the
clients of a server that returns do not all come at once.

What this module does not do: repeat what was asked on the lost connection (`channel.py`).
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from typing import Final

import trio

from trinamo.runtime.protocol.streams.codec import Frame

from ..peer import StreamPeer

PAUSE_MIN_S: Final = 0.05
PAUSE_MAX_S: Final = 1.0
"""Between two tries to connect, before jitter."""


class Connector(ABC):
    """Keeps one connection to `port` of `host` while `run` runs.

    Args:
        host: The service's host.
        port: Where it listens.
        rng: Dice for the jitter: the environment's.
        dial_timeout_s: The bound on one try to connect.
        silence_s: When a connection that says nothing is given up.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        rng: random.Random,
        dial_timeout_s: float = 1.0,
        silence_s: float = 6.0,
    ) -> None:
        self.where = f"{host}:{port}"
        self.peer: StreamPeer | None = None
        self.last_words = "no connection was tried yet"
        """Why there is no connection."""
        self.is_failing = False
        """Whether the last try to connect failed."""
        self._host, self._port = host, port
        self._rng = rng
        self._dial_timeout_s = dial_timeout_s
        self._silence_s = silence_s
        self._alarm = trio.CancelScope()
        """Round the sleep of whoever listens for silence."""

    async def run(self) -> None:
        """Connect, and connect again, until cancelled."""
        pause_s = PAUSE_MIN_S
        while True:
            stream = await self._dial()
            self.is_failing = stream is None
            if stream is None:
                self.unreached()
            else:
                pause_s = PAUSE_MIN_S
                self.peer = peer = StreamPeer(stream)
                self.opened(peer)
                try:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._listen_for_silence, peer)
                        await peer.run(self._receive)
                        nursery.cancel_scope.cancel()
                finally:
                    self.peer = None
                    self.lost()
                self.last_words = f"the connection to {self.where} was lost"
            await trio.sleep(self._jitter(pause_s))
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def _jitter(self, seconds: float) -> float:
        return seconds * self._rng.uniform(0.5, 1.5)

    async def _dial(self) -> trio.SocketStream | None:
        with trio.move_on_after(self._dial_timeout_s):
            try:
                return await trio.open_tcp_stream(self._host, self._port)
            except OSError as error:
                self.last_words = f"cannot connect to {self.where}: {error}"
                return None
        self.last_words = f"{self.where} does not answer"
        return None

    def _receive(self, frame: Frame) -> None:
        self._alarm.deadline = trio.current_time() + self._silence_s / 2
        self.received(frame)

    async def _listen_for_silence(self, peer: StreamPeer) -> None:
        half_s, asked_s = self._silence_s / 2, -math.inf
        while True:
            # The deadline moves with every frame, so that a busy connection costs no step.
            with trio.CancelScope(deadline=trio.current_time() + half_s) as self._alarm:
                await trio.sleep_forever()
            if peer.heard_s < asked_s:
                peer.close()
                return
            asked_s = trio.current_time()
            self.ping(peer)

    # --- what happens to it, told synchronously ------------------------------------------------------

    @abstractmethod
    def opened(self, peer: StreamPeer) -> None:
        """A connection is there; nothing was sent on it yet."""

    @abstractmethod
    def unreached(self) -> None:
        """The service could not be dialled; it is tried again after a pause."""

    @abstractmethod
    def received(self, frame: Frame) -> None:
        """A frame came."""

    @abstractmethod
    def lost(self) -> None:
        """The connection is gone; what was posted on it may or may not have arrived."""

    @abstractmethod
    def ping(self, peer: StreamPeer) -> None:
        """Post something that the service answers at once."""
