"""From endpoints to a gRPC channel as `rpc.py` wants one: its threads on one side, trio on the other.

A stream costs two threads: gRPC's own, which takes requests from a queue, and the reader here,
which hands replies to a bounded channel and so passes on backpressure. That is why the plane has
exactly two streams, however many watches and leases it carries. Both threads are gone when the
context is left. What travels is not known here. The channel must be opened after the last fork of the process:
gRPC's threads do not survive one, which is why workers are spawned.

Unary calls cost no thread each. gRPC's blocking API hands out a future and calls back from a thread of its own when it is done. The
callback wakes the trio task, or rather: it notes the task and wakes trio once for all that are done
by then, because a wake-up is a system call. A cancelled task cancels its call, at once and without
waiting.
"""

from __future__ import annotations

import ipaddress
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import attrs
import grpc
import trio

from trinamo.runtime.config.planes import TlsConfig, need_endpoints
from trinamo.runtime.errors import ConfigError, ConnectError

from .rpc import METHODS, Metadata, StatusError, Stream, StreamLostError

# As we write them, 16 of the largest values, and their keys; a longer page is asked for in smaller ones.
REPLY_BYTES_MAX: Final = 17 << 20

_OPTIONS: Final = (
    # A server that hangs never ends a stream by itself; unanswered pings do (etcd issue 8980).
    # etcd refuses pings more often than every five seconds. Until they have found a member that
    # hangs, every third call of three members goes there and costs a try.
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    # By default the pauses between attempts grow to two minutes, which looks like a dead watch.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A member that was moved to another machine has another address behind its name.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.max_receive_message_length", REPLY_BYTES_MAX),
    # Two planes in one process shall not share a connection: each fails and mends by itself.
    ("grpc.use_local_subchannel_pool", 1),
)


@attrs.frozen
class Endpoints:
    """The members of one cluster, as `host:port`; or a lone one, as `unix:/path`."""

    addresses: tuple[str, ...]
    uses_tls: bool

    @property
    def server_name(self) -> str | None:
        """The name for all members' certificates where gRPC cannot tell one from the target."""
        # It would look for the whole list of addresses in the certificate.
        several = len(self.addresses) > 1
        return self.addresses[0].rpartition(":")[0].strip("[]") if several else None


def parse_endpoints(endpoints: str | Sequence[str]) -> Endpoints:
    """Take `host:port` or URLs, alone, in a sequence or separated by commas; or one `unix:/path`.

    Raises `ConfigError` that names the part it cannot read.
    """
    parts = endpoints.split(",") if isinstance(endpoints, str) else endpoints
    given = [part.strip() for part in parts]
    if not given:
        raise ConfigError("no etcd endpoint is given")
    try:
        need_endpoints(given)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if given[0].startswith("unix:/"):
        return Endpoints((given[0].replace("unix:///", "unix:/"),), uses_tls=False)
    schemes = {each.startswith("https://") for each in given}
    if len(schemes) > 1:
        raise ConfigError("etcd endpoints must be all http or all https")
    return Endpoints(tuple(each.rpartition("://")[2].rstrip("/") for each in given), schemes.pop())


async def resolve(endpoints: Endpoints) -> str:
    """The gRPC target for all endpoints together.

    gRPC knows lists of addresses only, so several names are looked up here. Raises `ConnectError`
    if a name is not known.
    """
    if endpoints.addresses[0].startswith("unix:"):
        return endpoints.addresses[0]
    if len(endpoints.addresses) == 1 and _family(endpoints.addresses[0]) is None:
        return f"dns:///{endpoints.addresses[0]}"
    literals = [address for item in endpoints.addresses for address in await _look_up(item)]
    families = {_family(address) for address in literals}
    # A target is of one family; where a name has both, IPv4 is enough to reach the member.
    family = "ipv4" if "ipv4" in families else "ipv6"
    return f"{family}:" + ",".join(item for item in literals if _family(item) == family)


async def _look_up(address: str) -> list[str]:
    if _family(address) is not None:
        return [address]
    host, _, port = address.rpartition(":")
    try:
        found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
    except OSError as error:
        raise ConnectError(
            f"the etcd endpoint {address} cannot be resolved: {error.strerror}"
        ) from error
    return [
        f"[{sockaddr[0]}]:{port}" if family == trio.socket.AF_INET6 else f"{sockaddr[0]}:{port}"
        for family, _, _, _, sockaddr in found
    ]


def _family(address: str) -> str | None:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return f"ipv{ipaddress.ip_address(host).version}"
    except ValueError:
        return None


def open_channel(
    target: str, section: TlsConfig, *, uses_tls: bool, server_name: str | None
) -> Any:
    """A `grpc.Channel` to any member behind `target`; it connects with its first call.

    Raises `ConfigError` if the TLS files cannot be read.
    """
    options: list[tuple[str, Any]] = list(_OPTIONS)
    # With several members, calls go round; a dead one is left out. A name may stand for several.
    goes_round = "," in target or target.startswith("dns:")
    policy = "round_robin" if goes_round else "pick_first"
    options.append(("grpc.lb_policy_name", policy))
    if not uses_tls:
        return grpc.insecure_channel(target, options=options)
    if server_name is not None:
        options.append(("grpc.ssl_target_name_override", server_name))
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_read(section.ca_file),
        private_key=_read(section.key_file),
        certificate_chain=_read(section.cert_file),
    )
    return grpc.secure_channel(target, credentials, options=options)


def _read(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"the etcd TLS file {path} cannot be read: {error.strerror}") from error


REQUESTS_MAX: Final = 100_000
REPLIES_MAX: Final = 16


class GrpcStream:
    """An open stream; see `Stream`."""

    def __init__(self, method: Any, metadata: Metadata) -> None:
        self._requests: queue.Queue[Any] = queue.Queue()
        self._send, self._receive = trio.open_memory_channel[Any](REPLIES_MAX)
        self._token = trio.lowlevel.current_trio_token()
        self._ended = trio.Event()
        self._error: StatusError | None = None
        self._call = method(iter(self._requests.get, None), metadata=metadata)
        self._reader = threading.Thread(target=self._read, name="etcd-stream", daemon=True)
        self._reader.start()

    def send_nowait(self, *requests: Any) -> None:
        # A stuck stream is cut after a silence of seconds, so the bound is only reached when
        # something opens watches without end; then a new stream is the remedy as well.
        if self._requests.qsize() >= REQUESTS_MAX:
            raise StreamLostError(f"{REQUESTS_MAX} requests are waiting to be sent")
        for request in requests:
            self._requests.put(request)

    async def receive(self) -> list[Any]:
        try:
            replies = [await self._receive.receive()]
        except trio.EndOfChannel:
            why = "the server ended the stream" if self._error is None else self._error.text
            raise StreamLostError(why, self._error) from None
        with suppress(trio.WouldBlock, trio.EndOfChannel):
            while True:
                replies.append(self._receive.receive_nowait())
        return replies

    def cancel(self) -> None:
        """End the call; whoever receives gets `StreamLostError`."""
        self._call.cancel()

    async def close(self) -> None:
        """End the call and wait for the reader thread, which ends at once."""
        self._receive.close()
        self._call.cancel()
        self._requests.put(None)
        # No I/O is waited for: the cancelled call raises in the thread, whatever the server does.
        with trio.CancelScope(shield=True):
            await self._ended.wait()
        self._reader.join()

    def _read(self) -> None:
        try:
            for reply in self._call:
                trio.from_thread.run(self._send.send, reply, trio_token=self._token)
        except grpc.RpcError as error:
            self._error = status_of(error)
        except (
            trio.BrokenResourceError,
            trio.ClosedResourceError,
            trio.Cancelled,
            trio.RunFinishedError,
        ):
            self._call.cancel()
        finally:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._end)

    def _end(self) -> None:
        self._send.close()
        self._ended.set()


def status_of(error: Any) -> StatusError:
    """The same of a gRPC error, which lets go of the frames that it was raised in.

    It is the call itself, which these hold: together they would wait for Python's collector. In a process that ends
    that is its very last step, and there the call's end takes a lock that gRPC's thread may have died with.
    """
    error.__traceback__ = None
    return StatusError(error.code().name, str(error.details() or error.code().name))


class GrpcChannel:
    """The methods of etcd over an open `grpc.Channel`, which it closes. Implements `Channel`."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._methods: dict[str, Any] = {}
        self._token = trio.lowlevel.current_trio_token()
        # At most one entry a call in flight, so its bound is that of the callers' tasks.
        self._wakes: deque[Callable[[], None]] = deque()
        self._is_told = False

    def _method(self, name: str, *, is_stream: bool) -> Any:
        made = self._methods.get(name)
        if made is None:
            method, channel = METHODS[name], self._channel
            make = channel.stream_stream if is_stream else channel.unary_unary
            made = self._methods[name] = make(
                f"/etcdserverpb.{method.service}/{name}",
                method.request.SerializeToString,
                method.reply.FromString,
            )
        return made

    async def call(
        self, name: str, request: Any, *, timeout_s: float, metadata: Metadata, waits: bool = False
    ) -> Any:
        """See `EtcdChannel.call`. `timeout_s` is gRPC's own deadline, so the server gives up with us."""
        await trio.lowlevel.checkpoint_if_cancelled()
        task = trio.lowlevel.current_task()
        method = self._method(name, is_stream=False)
        future = method.future(request, timeout=timeout_s, metadata=metadata, wait_for_ready=waits)
        is_waiting = True

        def wake() -> None:
            nonlocal is_waiting
            # The callback may have been queued before the task was cancelled.
            if is_waiting:
                is_waiting = False
                trio.lowlevel.reschedule(task)

        def on_done(_: Any) -> None:
            # Have trio call `wake`; from any thread.
            # First the entry, then the look: `_wake_all` does the two in the opposite order, so an
            # entry that finds trio told is always seen by it. No lock is needed.
            self._wakes.append(wake)
            if not self._is_told:
                self._is_told = True
                with suppress(trio.RunFinishedError):
                    self._token.run_sync_soon(self._wake_all)

        def abort(_: Any) -> trio.lowlevel.Abort:
            nonlocal is_waiting
            is_waiting = False
            future.cancel()
            return trio.lowlevel.Abort.SUCCEEDED

        future.add_done_callback(on_done)
        try:
            await trio.lowlevel.wait_task_rescheduled(abort)
            return future.result()
        except grpc.FutureCancelledError:
            # Somebody closed the channel under the call. The future is itself the gRPC error.
            raise status_of(future) from None
        except grpc.RpcError as error:
            raise status_of(error) from None

    def _wake_all(self) -> None:
        self._is_told = False
        while self._wakes:
            self._wakes.popleft()()

    @asynccontextmanager
    async def open_stream(self, name: str, *, metadata: Metadata) -> AsyncIterator[Stream]:
        stream = GrpcStream(self._method(name, is_stream=True), metadata)
        try:
            yield stream
        finally:
            await stream.close()

    def close(self) -> None:
        self._channel.close()
