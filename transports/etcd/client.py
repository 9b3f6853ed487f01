"""Unary calls to etcd: deadlines, repetition, tokens. What the calls mean is in `control.py`.

The rule of repetition: a call of which nothing was sent is always tried again. One that may have
taken effect is tried again only if a second effect would change nothing. Everything is bounded by
one deadline per call; each try of a repeatable call gets a shorter one, so that a member of the
cluster that hangs costs one try and not the whole call.
"""

from __future__ import annotations

import logging
import math
import random
from typing import Any, Final

import attrs
import trio

from trinamo.runtime.errors import (
    ConnectError,
    ControlPlaneError,
    DeadlineError,
    TrinamoError,
    UnknownOutcomeError,
)

from . import wire_pb2 as wire
from .rpc import CallVerdict, EtcdChannel, Metadata, StatusError, final_error, judge

_log = logging.getLogger("trinamo.etcd")

RETRY_PAUSE_MIN_S: Final = 0.02
RETRY_PAUSE_MAX_S: Final = 0.5
LOG_INTERVAL_S: Final = 5.0


@attrs.frozen
class Credentials:
    username: str
    password: str = attrs.field(repr=False)


class EtcdClient:
    """Calls over one channel.

    Args:
        channel: What carries the calls; the client closes it.
        where: The endpoints, for messages.
        credentials: If the cluster has access control.
        rng: Dice for pauses; the system's if not given.
        timeout_s: The bound on one call with all its tries.
        per_try_timeout_s: The bound on one try of a repeatable call.
    """

    def __init__(
        self,
        channel: EtcdChannel,
        *,
        where: str,
        credentials: Credentials | None = None,
        rng: random.Random | None = None,
        timeout_s: float = 5.0,
        per_try_timeout_s: float = 1.0,
    ) -> None:
        self.where = where
        self.timeout_s = timeout_s
        self.per_try_timeout_s = per_try_timeout_s
        self.credentials = credentials
        self._rng = rng or random.SystemRandom()
        self.channel = channel
        self._token = ""
        self._token_lock = trio.Lock()
        self._is_closed = False
        self.is_connected = False
        self.stream_losses = 0
        self._heard_at = trio.current_time()
        self._was_connected = False
        self._quiet_until = 0.0

    def jittered(self, pause_s: float) -> float:
        """About so long: those who lost the store in one moment shall not return in one."""
        return pause_s * self._rng.uniform(0.5, 1.5)

    def heard(self) -> None:
        self._heard_at = trio.current_time()
        if not self.is_connected:
            self.is_connected = True
            self._tell("etcd at %s answers", self.where)

    def missed(self, why: str) -> None:
        if self.is_connected:
            self.is_connected = False
            self._tell("etcd at %s does not answer: %s", self.where, why)

    @property
    def silence_s(self) -> float:
        """Seconds since the store last answered, or since the start if it never did."""
        return trio.current_time() - self._heard_at

    def lost_stream(self, why: str) -> None:
        """A stream with something on it ended unasked."""
        self.stream_losses += 1
        self.missed(why)

    def _tell(self, text: str, *values: str) -> None:
        # A member that hangs makes answers and silence alternate; the first of each is enough.
        level = logging.WARNING if trio.current_time() >= self._quiet_until else logging.DEBUG
        if self.is_connected and not self._was_connected:
            level = logging.INFO
        elif level == logging.WARNING and self.is_connected:
            self._quiet_until = trio.current_time() + LOG_INTERVAL_S
        self._was_connected = True
        _log.log(level, text, *values)

    def close(self) -> None:
        """Close the channel; every call in flight and every later one fails."""
        self._is_closed = True
        self.is_connected = False
        self.channel.close()

    async def read(self, name: str, request: Any) -> Any:
        """A call without an effect. Raises `ConnectError`, `DeadlineError` or the store's no."""
        return (await self._repeat(name, request, repeatable=True, writes=False))[0]

    async def write_repeatably(self, name: str, request: Any) -> tuple[Any, bool]:
        """A call whose second effect changes nothing that matters; whether an earlier try may have had one, too."""
        return await self._repeat(name, request, repeatable=True, writes=True)

    async def write_once(self, name: str, request: Any) -> Any:
        """A call that is sent at most once; `UnknownOutcomeError` if its reply is lost."""
        return (await self._repeat(name, request, repeatable=False, writes=True))[0]

    async def metadata(self) -> Metadata:
        """What goes with every call: the token, if there are credentials."""
        if self.credentials is None:
            return ()
        if not self._token:
            await self.authenticate(stale_token="")
        return (("token", self._token),)

    async def authenticate(self, *, stale_token: str) -> None:
        """Get a new token unless somebody has already replaced `stale_token`.

        Tokens end after five minutes without use and with every restart of a server.
        """
        if self.credentials is None:
            return
        async with self._token_lock:
            if self._token != stale_token:
                return
            request = wire.AuthenticateRequest(
                name=self.credentials.username, password=self.credentials.password
            )
            answer, _ = await self._repeat(
                "Authenticate", request, repeatable=True, writes=False, metadata=()
            )
            self._token = answer.token

    async def _repeat(
        self,
        name: str,
        request: Any,
        *,
        repeatable: bool,
        writes: bool,
        metadata: Metadata | None = None,
    ) -> tuple[Any, bool]:
        deadline = trio.current_time() + self.timeout_s
        pause_s = RETRY_PAUSE_MIN_S
        is_doubtful = was_denied = False
        text = f"etcd at {self.where}: {name}"
        while True:
            left_s = max(0.0, deadline - trio.current_time())
            try_s = min(left_s, self.per_try_timeout_s) if repeatable else left_s
            if left_s <= 0:
                raise _given_up(text, is_doubtful=is_doubtful, writes=writes)
            if self._is_closed:
                raise ConnectError(f"the control plane to etcd at {self.where} is closed")
            sent_with = await self.metadata() if metadata is None else metadata
            try:
                reply = await self.channel.call(name, request, timeout_s=try_s, metadata=sent_with)
            except StatusError as error:
                verdict = judge(error)
                text = f"etcd at {self.where}: {name}: {error.text}"
                self._note(verdict, error.text)
                if verdict is CallVerdict.DENIED and (
                    self.credentials is not None and metadata is None and not was_denied
                ):
                    was_denied = True
                    await self.authenticate(stale_token=sent_with[0][1])
                    continue
                if verdict in (CallVerdict.FINAL, CallVerdict.DENIED):
                    raise final_error(error) from None
                is_doubtful |= verdict is CallVerdict.UNKNOWN
                if is_doubtful and not repeatable:
                    raise UnknownOutcomeError(text) from None
                if deadline - trio.current_time() <= pause_s:
                    raise _given_up(text, is_doubtful=is_doubtful, writes=writes) from None
            else:
                self.heard()
                return reply, is_doubtful
            await trio.sleep(self.jittered(pause_s))
            pause_s = min(2 * pause_s, RETRY_PAUSE_MAX_S)

    def _note(self, verdict: CallVerdict, why: str) -> None:
        if verdict in (CallVerdict.UNSENT, CallVerdict.UNKNOWN):
            self.missed(why)
        else:
            self.heard()


def _given_up(text: str, *, is_doubtful: bool, writes: bool) -> TrinamoError:
    if not is_doubtful:
        return ConnectError(text)
    return UnknownOutcomeError(text) if writes else DeadlineError(text)


def lease_seconds(ttl_s: float) -> int:
    """What etcd is asked for: whole seconds, rounded up."""
    if not (ttl_s > 0 and math.isfinite(ttl_s)):
        raise ControlPlaneError(f"a lease of {ttl_s} s is impossible", definite=True)
    return math.ceil(ttl_s)
