"""The one place where asyncio runs: a connection to NATS on an asyncio loop inside trio.

A crossing between trio and asyncio costs some 70 microseconds of CPU, so there is none per
message. One asyncio task per connection lives as long as the plane. trio code appends to an
`Outbox` and sets an asyncio event, both plain calls in the same thread; arriving messages are
delivered by plain calls the other way.

Each connection is a fresh nats-py client; when it ends, for whatever reason, the island backs off
and makes the next one, for ever, and subscribes again to all that is wanted. An error that is a bug
ends `run` and so reaches the nursery that runs it. What a message or a subscription means to the
rest of the process is in `plane.py`.

nats-py's client gets one promise more: where TLS is configured, nothing is said in clear. A NATS server speaks
first, in clear, and its INFO says whether TLS follows. nats-py believes it, so whoever sits on the way could say
`tls_required: false` and be handed the token.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 -- nats-py needs it; this module is where it is allowed
import contextlib
import logging
import math
import random
import ssl
from collections.abc import Awaitable, Collection, Sequence
from functools import partial
from typing import Any, Final

import attrs
import nats.errors
import trio
from nats.aio.client import Client

from trinamo.runtime.asyncio_loop import Tasks, open_loop
from trinamo.runtime.config.planes import NatsConfig, TlsConfig
from trinamo.runtime.errors import ConfigError, ConnectError, TrinamoError
from trinamo.runtime.logs.notices import LogNotices
from trinamo.runtime.nurseries import forget_frames
from trinamo.runtime.planes import Message

from .outbox import WITHOUT_JETSTREAM, Interest, Outbox

NAME: Final = "trinamo"
PINGS_OUTSTANDING_MAX: Final = 2


@attrs.frozen
class NatsOptions:
    """Where and how; `servers` win over those of the section."""

    servers: Sequence[str]
    section: NatsConfig
    tls: ssl.SSLContext | None = None

    @property
    def needs_tls(self) -> bool:
        """Whether any server is to be spoken to by TLS; then all are."""
        return self.tls is not None or any(
            server.startswith(("tls://", "wss://")) for server in self.servers
        )

    def client_options(self, servers: Sequence[str]) -> dict[str, Any]:
        """The keyword arguments of nats-py's `connect` for one connection, without callbacks.

        nats-py's own reconnection is off: it gives up for good on some server errors, and hides
        how much of what was published is lost with a connection.
        """
        section = self.section
        options: dict[str, Any] = {
            "servers": list(servers),
            "name": NAME,
            "allow_reconnect": False,
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": 0.01,
            "connect_timeout": section.connect_timeout_s,
            "ping_interval": section.ping_interval_s,
            "max_outstanding_pings": PINGS_OUTSTANDING_MAX,
            # Subjects were checked by the sender's side already.
            "skip_subject_validation": True,
        }
        given = {
            "user": section.username,
            "password": section.password and section.password.reveal(),
            "token": section.token and section.token.reveal(),
            "nkeys_seed": section.nkey_seed_file,
            "user_credentials": section.credentials_file,
            "tls": self.tls,
            "tls_hostname": section.tls.server_name,
        }
        return options | {key: value for key, value in given.items() if value}


def tls_context(section: TlsConfig) -> ssl.SSLContext | None:
    """What the section asks for; None without TLS, or with that of a `tls://` address alone."""
    if not section.enabled:
        return None
    context = ssl.create_default_context(cafile=section.ca_file)
    if section.cert_file is not None:
        context.load_cert_chain(section.cert_file, section.key_file)
    return context


class TlsRefusedError(nats.errors.Error):  # type: ignore[misc]  # nats-py has no types
    """The server, or somebody on the way to it, does not offer the TLS that is configured."""

    def __str__(self) -> str:
        return "TLS is configured and the server offers none; nothing was sent to it"


class NatsClient(Client):  # type: ignore[misc]  # nats-py has no types
    """A `Client` that, if it needs TLS, greets only over TLS."""

    def __init__(self, *, needs_tls: bool) -> None:
        super().__init__()
        self._needs_tls = needs_tls

    @property
    def has_met(self) -> bool:
        """Whether a server has answered; what it refuses then will be refused again."""
        return bool(self._server_info)

    @property
    def has_jetstream(self) -> bool:
        """Whether the server says that it runs JetStream."""
        return bool(self._server_info.get("jetstream"))

    def _connect_command(self) -> bytes:
        # The first bytes that nats-py sends by itself, and the credentials are in them.
        if self._needs_tls and not _is_encrypted(self._transport):
            raise TlsRefusedError
        return bytes(super()._connect_command())


def _is_encrypted(transport: Any) -> bool:
    """Whether TLS is established. What cannot be told counts as clear text."""
    writer = getattr(transport, "_io_writer", None)
    if writer is not None:
        return writer.get_extra_info("ssl_object") is not None
    return bool(getattr(transport, "_using_tls", False))  # A WebSocket.


# What nats-py's client leaves to its user: to be sure, to part in good order, to part at once.
#
# asyncio-flavoured. `_writer` is the one place that looks at a private
# name of nats-py; without it an abort does nothing, and the loop's end closes the socket.

SETTLE_TRIES = 100
CONFIRM_TIMEOUT_S = 10.0

CONNECTION_ERRORS = (nats.errors.Error, OSError, asyncio.TimeoutError)
"""All that nats-py raises when it is the network's or the server's doing."""


async def wait_for(awaitable: Awaitable[Any], timeout_s: float) -> None:
    """Wait until done or time is up, whichever is first."""
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if task.done():
            task.result()
    finally:
        task.cancel()


async def settle(client: Any) -> None:
    """Return once the server has processed all that was given to `client` so far.

    nats-py writes the ping of a `flush` past the commands that still wait for its writer task, so
    those must be gone first.
    """
    for _ in range(SETTLE_TRIES):
        await asyncio.sleep(0)
        if client.is_closed or client.pending_data_size == 0:
            break
        await asyncio.sleep(0.001)
    await client.flush(CONFIRM_TIMEOUT_S)


async def say_goodbye(client: Any, closed: asyncio.Event, timeout_s: float) -> None:
    if _writer(client) is None:
        return  # It never got as far as a socket.
    if client.is_connected:
        with contextlib.suppress(*CONNECTION_ERRORS):
            await wait_for(settle(client), timeout_s / 2)
    await client.close()
    # If nats-py is closing it already, `close` returns before the socket is closed.
    await closed.wait()


def _writer(client: Any) -> Any:
    return getattr(getattr(client, "_transport", None), "_io_writer", None)


def abort(client: Any) -> None:
    """Close the socket without flushing. nats-py has no public way to do that."""
    writer = _writer(client)
    if writer is not None:
        writer.transport.abort()


_log = logging.getLogger("trinamo.nats")
PUBLISH_BATCH = 64
ABORT_GRACE_S = 0.5
SERVERS_MAX = 64
RECONNECT_WAIT_S = 0.1
RECONNECT_WAIT_MAX_S = 5.0
OUTGOING_BYTES_MAX = 64 << 20


class Island:
    """Owns the connection. `run` is its life; everything else is synchronous.

    A plane puts interests and messages in, by plain calls. The island takes them out, makes every
    interest again on each new connection, and says what is lost with the old one.
    """

    def __init__(self, options: NatsOptions, *, rng: random.Random) -> None:
        self._section: NatsConfig = options.section
        self.outbox = Outbox(
            messages_max=self._section.outgoing_messages_max, bytes_max=OUTGOING_BYTES_MAX
        )
        self.interests: dict[Interest, None] = {}
        self.message_bytes_max = 1_048_576
        self.is_connected = False
        self.connection_count = 0
        self.server = ""
        self.last_error = "not connected yet"
        self.options = options
        self.is_closing = False
        self._rng = rng
        self._notices = LogNotices(_log)
        self._servers = list(options.servers)
        self._unknown_host = ""
        """Whose address was asked for and not told."""
        self._opened = trio.Event()
        self._open_error: TrinamoError | None = None
        self._bug: BaseException | None = None
        self._scope = trio.CancelScope(shield=True)
        self._give_up_at = math.inf
        self._start_until = trio.current_time() + self._section.start_timeout_s
        self._wake = asyncio.Event()
        self._closing = asyncio.Event()
        self._confirmations: set[asyncio.Task[None]] = set()
        self._tasks: Tasks = {}

    # --- trio's side: plain calls, and the two ends of the life ---------------------------------

    def add(self, interest: Interest) -> None:
        """Subscribe from now on, on this connection and all that follow."""
        self.interests[interest] = None
        # Without a connection the table is enough: the next one starts with all that is in it.
        if self.is_connected:
            self.outbox.put_change(interest)
            self.wake()

    def remove(self, interest: Interest) -> None:
        interest.is_wanted = False
        del self.interests[interest]
        if interest.handle is not None:
            self.outbox.put_change(interest)
            self.wake()

    def wake(self) -> None:
        """There is something in the outbox."""
        self._wake.set()

    def close(self) -> None:
        """Send what is waiting, say goodbye and let `run` return; bounded by the drain timeout."""
        if self.is_closing:
            return
        self.is_closing = True
        self._closing.set()
        self.wake()
        # The island bounds its own goodbye; this is for the day that bound fails.
        self._give_up_at = trio.current_time() + self._section.drain_timeout_s
        self._scope.deadline = self._give_up_at + 3 * ABORT_GRACE_S + 1.0

    async def wait_open(self) -> None:
        """Return once connected; raises `ConnectError` if none is within `start_timeout_s`, or a server refuses."""
        await self._opened.wait()
        if self._open_error is not None:
            raise self._open_error

    async def run(self) -> None:
        """Live until `close`. Raises only what is a bug.

        Shielded, because a plane whose surroundings are cancelled must still close its socket in
        order; whoever runs this calls `close` on the way out, which bounds the shield.
        """
        finished = trio.Event()
        error: BaseException | None = None
        with self._scope:
            async with open_loop(self._on_loop_error) as (loop, self._tasks):
                loop.getaddrinfo = self._look_up
                main: asyncio.Task[None] = loop.create_task(self._main())
                main.add_done_callback(lambda _: finished.set())
                # Not `aio_as_trio`: were `main` to swallow its cancellation, so would that.
                await finished.wait()
                error = None if main.cancelled() else main.exception()
        if error is not None:
            # Outside the loop, whose nurseries would wrap it twice.
            raise error

    # --- asyncio's side -------------------------------------------------------------------------

    async def _look_up(self, host: Any, port: Any, **hints: Any) -> Any:
        """The loop's `getaddrinfo`, which would wait for a silent DNS server after it was cancelled."""
        self._unknown_host = str(host)
        loop: Any = asyncio.get_running_loop()
        found = await loop.trio_as_future(partial(trio.socket.getaddrinfo, host, port, **hints))
        self._unknown_host = ""
        return found

    async def _main(self) -> None:
        attempt = 0
        while not self.is_closing and self._open_error is None:
            client = NatsClient(needs_tls=self.options.needs_tls)
            closed, ours = asyncio.Event(), set(self._tasks)
            try:
                error = await self._connect(client, closed)
                if error is None:
                    attempt = 0
                    await self._hold(client)
            finally:
                self._forget(client)
                await self._dispose(client, closed, ours)
            if self._bug is not None:
                raise self._bug
            is_unopened = error is not None and not self._opened.is_set()
            is_refused = client.has_met or isinstance(error, ConfigError)
            if is_unopened and (is_refused or trio.current_time() >= self._start_until):
                self._open_error = error
            elif not self.is_closing:
                if is_unopened and not attempt:
                    _log.warning("%s; trying again", error)
                attempt += 1
                wait_s = min(RECONNECT_WAIT_MAX_S, RECONNECT_WAIT_S * 2.0 ** min(attempt - 1, 16))
                # Spread out, so that a server that returns is not met by all its clients at once.
                await wait_for(self._closing.wait(), wait_s * self._rng.uniform(0.5, 1.0))
        self._opened.set()
        if left := self.outbox.clear():
            _log.warning("closed: %d messages could not be sent", left)

    async def _hold(self, client: Any) -> None:
        """Serve until the connection ends, or this side has closed and all is sent, or time for that is over."""
        serving = asyncio.ensure_future(self._serve(client))
        closing = asyncio.ensure_future(self._closing.wait())
        await asyncio.wait({serving, closing}, return_when=asyncio.FIRST_COMPLETED)
        closing.cancel()
        if not serving.done():
            await asyncio.wait({serving}, timeout=self._patience_s())
        if not serving.done():
            # The server reads nothing and the socket's buffer is full. nats-py swallows a cancel
            # while it waits for that, so it is the socket that must end.
            abort(client)
            await asyncio.wait({serving}, timeout=ABORT_GRACE_S)
        if serving.done():
            serving.result()
        serving.cancel()

    async def _connect(self, client: Any, closed: asyncio.Event) -> TrinamoError | None:
        """Connect and restore every subscription; the error if that failed."""

        async def on_closed() -> None:
            closed.set()
            self.wake()

        connecting: asyncio.Task[None] = asyncio.ensure_future(
            client.connect(
                error_cb=self._on_error,
                closed_cb=on_closed,
                **self.options.client_options(self._servers),
            )
        )
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            timeout_s = self._section.connect_timeout_s * 2 * len(self._servers)
            await asyncio.wait(
                {connecting, closing}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if self.is_closing or not connecting.done():
                connecting.cancel()
                await asyncio.wait({connecting}, timeout=ABORT_GRACE_S)
                if connecting.done() and not connecting.cancelled():
                    connecting.exception()  # Seen, so that asyncio does not complain.
                return self._connect_error(f"no answer within {timeout_s:g} s")
            connecting.result()
            if not client.is_connected:
                return self._connect_error("the server closed the connection while greeting")
            if self._section.jetstream and not client.has_jetstream:
                return self._connect_error("the server runs without JetStream, which is required")
            await self._restore(client)
        except ImportError as missing:
            return ConfigError(f"{missing.name} is not installed; pip install 'nats-py[nkeys]'")
        except CONNECTION_ERRORS as error:
            # They hold the client, which holds it: all attempts of an outage would stay.
            forget_frames(error)
            return self._connect_error(str(error) or type(error).__name__)
        finally:
            closing.cancel()
        self._opened.set()
        return None

    async def _restore(self, client: Any) -> None:
        # Until there is nothing left to do, because more may be wanted by the time some are done.
        while missing := self.missing():
            for interest in missing:
                await self._subscribe(client, interest)
            await settle(client)
        self.message_bytes_max = client.max_payload
        # Members of the cluster that the server told us about serve the next connection too.
        known = [each.geturl() for each in client.discovered_servers]
        self._servers += [each for each in known if each not in self._servers]
        del self._servers[SERVERS_MAX:]
        where = client.connected_url.netloc.rpartition("@")[2]
        version = client.connected_server_version
        server = f"nats-server {version.major}.{version.minor}.{version.patch} at {where}"
        # It knows all interests: it counts as open.
        for interest in self.interests:
            interest.confirmed()
        self.server = server if client.has_jetstream else f"{server} {WITHOUT_JETSTREAM}"
        self.connection_count += 1
        self.is_connected = True
        log = _log.info if self.connection_count == 1 else _log.warning
        log("connected to %s", self.server)

    def missing(self) -> list[Interest]:
        """What the present connection does not know yet."""
        return [each for each in self.interests if each.handle is None]

    def _patience_s(self) -> float:
        return max(0.0, self._give_up_at - trio.current_time())

    async def _serve(self, client: Any) -> None:
        """Empty the outbox until the connection ends, or this side closes and it is empty."""
        sent = 0
        # nats-py's reader ends without a word on bytes it cannot decode, such as a subject that
        # is not UTF-8; waiting for its pings to go unanswered would take half a minute.
        reader = getattr(client, "_reading_task", None)
        if reader is not None:
            reader.add_done_callback(lambda _: self.wake())
        while not client.is_closed and self._bug is None:
            if reader is not None and reader.done():
                return
            item = self.outbox.take()
            if item is None:
                if self.is_closing:
                    return
                await self._wake.wait()
                self._wake.clear()
                continue
            try:
                if isinstance(item, Interest):
                    await self._change(client, item)
                elif item.size <= client.max_payload:
                    await client.publish(
                        item.subject, item.payload, item.reply, item.headers or None
                    )
                else:  # It was checked against an earlier server's limit.
                    self.outbox.dropped += 1
                    self._notices.warn("message too large for this server", item.subject)
            except CONNECTION_ERRORS:
                self.outbox.put_back(item)
                return
            sent += 1
            if sent % PUBLISH_BATCH == 0:
                # nats-py's publish rarely yields; its reader and writer need their turns.
                await asyncio.sleep(0)

    async def _change(self, client: Any, interest: Interest) -> None:
        if interest.is_wanted and interest.handle is None:
            await self._subscribe(client, interest)
            confirmation = asyncio.ensure_future(self._confirm(client, interest))
            self._confirmations.add(confirmation)
            confirmation.add_done_callback(self._on_confirmation_done)
        elif not interest.is_wanted and interest.handle is not None:
            handle, interest.handle = interest.handle, None
            await handle.unsubscribe()

    async def _subscribe(self, client: Any, interest: Interest) -> None:
        async def on_message(received: Any) -> None:
            try:
                interest.deliver(
                    Message(received.subject, received.data, received.reply, received.headers or {})
                )
            except Exception as bug:  # noqa: BLE001 -- nats-py would log it and go on
                self._bug = bug
                self.wake()

        # Unlimited in nats-py: it hands messages over as fast as it reads them, and the bound of
        # the subscription is where they go.
        interest.handle = await client.subscribe(
            interest.pattern,
            queue=interest.group,
            cb=on_message,
            pending_msgs_limit=0,
            pending_bytes_limit=0,
        )
        if not interest.is_wanted:
            self.outbox.put_change(interest)

    async def _confirm(self, client: Any, interest: Interest) -> None:
        try:
            await settle(client)
        except CONNECTION_ERRORS as error:
            self._notices.warn("subscription not confirmed", error)
        interest.confirmed()

    def _on_confirmation_done(self, confirmation: asyncio.Task[None]) -> None:
        self._confirmations.discard(confirmation)
        if not confirmation.cancelled() and (bug := confirmation.exception()) is not None:
            self._bug = bug
            self.wake()

    def _forget(self, client: Any) -> None:
        if self.is_connected and not self.is_closing:
            self.last_error = str(client.last_error or "the server closed the connection")
            self._notices.warn("disconnected", f"{self.server}: {self.last_error}")
        for confirmation in self._confirmations:
            confirmation.cancel()
        # Nobody may wait for it any more.
        self.is_connected = False
        for interest in self.interests:
            interest.handle = None
            interest.confirmed()

    async def _dispose(self, client: Any, closed: asyncio.Event, ours: Collection[Any]) -> None:
        """Close the client in good order if the server plays along, else abort its socket.

        No task is left but `ours`.
        """
        patience_s = self._patience_s() if self.is_closing else ABORT_GRACE_S
        goodbye = asyncio.ensure_future(say_goodbye(client, closed, patience_s))
        await asyncio.wait({goodbye}, timeout=patience_s)
        if not goodbye.done():
            # A server that reads nothing would keep the close waiting for its buffer for ever.
            abort(client)
            await asyncio.wait({goodbye}, timeout=ABORT_GRACE_S)
        if not goodbye.done():
            goodbye.cancel()
        elif (error := goodbye.exception()) is not None:
            self._notices.warn("close", error)
            abort(client)
        # nats-py forgets those of its subscriptions if the connection breaks while it is closed.
        its = [each for each in self._tasks if each not in ours]
        for each in its:
            each.cancel()
        if its:
            await asyncio.wait(its, timeout=ABORT_GRACE_S)

    def _connect_error(self, reason: str) -> ConnectError:
        if "no servers available" in reason and self.last_error:
            reason = self.last_error
        if self._unknown_host:
            reason += f"; no name server tells the address of {self._unknown_host!r}"
        self.last_error = reason
        servers = ", ".join(each.rpartition("@")[2] for each in self.options.servers)
        if self._opened.is_set() and not self.is_closing:
            self._notices.warn("cannot reconnect", f"{servers}: {reason}")
        return ConnectError(f"cannot connect to NATS at {servers}: {reason}")

    def _on_loop_error(self, context: dict[str, Any]) -> None:
        """An exception nobody asked for: nats-py's tasks die of one when a connection breaks.

        trio-asyncio would raise it in the loop's nursery and so end the plane. What is a bug of
        ours gets there by `_bug`. It may come from the garbage collector, long after the loop.
        """
        if trio.lowlevel.in_trio_run():
            self._notices.warn("nats-py", context.get("exception") or context.get("message"))

    async def _on_error(self, error: Exception) -> None:
        # Our own callbacks catch what is a bug of ours, so this is the network's or a peer's doing.
        forget_frames(error)
        self.last_error = str(error) or type(error).__name__
        if self.is_connected and not self.is_closing:
            self._notices.warn("error", self.last_error)
