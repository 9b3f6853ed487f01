"""The greeting of a standing connection over a socket, both ends; `protocol/streams/membership.py` says how."""

from __future__ import annotations

import trio

from trinamo.runtime.env import Env
from trinamo.runtime.errors import ConnectError, ImpostorError, RemoteProtocolError
from trinamo.runtime.protocol.streams.membership import NONCE_BYTES, Greeting, Purpose

from .sockets import TcpOptions, dial


async def dial_member(
    address: str, options: TcpOptions, env: Env, purpose: Purpose
) -> tuple[trio.SocketStream, str]:
    """Connect to a port of this cluster; the stream, and the name of who listens there.

    Connecting and greeting take at most `connect_timeout_s` each. A connection that breaks while it
    greets is made once more: nothing was said on it, and a caller may wait for this call. Raises
    `ConnectError`, as `ImpostorError` if it is no port of this cluster.
    """
    try:
        return await _dial_and_greet(address, options, env, purpose)
    except ConnectError as error:
        if not isinstance(error.__cause__, trio.BrokenResourceError):
            raise
    return await _dial_and_greet(address, options, env, purpose)


async def _dial_and_greet(
    address: str, options: TcpOptions, env: Env, purpose: Purpose
) -> tuple[trio.SocketStream, str]:
    stream = await dial(address, options)
    try:
        with trio.fail_after(options.connect_timeout_s):
            return stream, await greet(stream, address, options, env, purpose)
    except trio.TooSlowError:
        stream.socket.close()
        raise ConnectError(
            f"{address} did not greet within {options.connect_timeout_s:g} s"
        ) from None
    except BaseException:
        stream.socket.close()
        raise


async def greet(
    stream: trio.SocketStream, address: str, options: TcpOptions, env: Env, purpose: Purpose
) -> str:
    """The dialler's end; the listener's name. Whoever calls it bounds its time.

    Raises as `dial_member`, and leaves the stream open.
    """
    greeting = Greeting.dialling(purpose, options.secret, _nonce(env))
    try:
        is_whole = await _converse(stream, greeting)
    except (trio.BrokenResourceError, OSError) as error:
        raise ConnectError(f"{address} broke the connection before it was greeted") from error
    except RemoteProtocolError as error:
        raise ImpostorError(f"{address}: {error.message}") from error
    if not is_whole:
        raise ConnectError(
            f"{address} closed the connection before it was greeted: it is ending, or its "
            "security.secret_file is another"
        )
    return greeting.peer_name


async def welcome(
    stream: trio.SocketStream, options: TcpOptions, env: Env, purpose: Purpose, name: str
) -> None:
    """The listener's end; whoever calls it bounds its time.

    Raises `RemoteProtocolError` or `trio.BrokenResourceError` for a peer that must be told nothing.
    """
    greeting = Greeting.listening(purpose, options.secret, _nonce(env), name)
    if not await _converse(stream, greeting):
        raise RemoteProtocolError("the connection ended before its greeting")


async def _converse(stream: trio.SocketStream, greeting: Greeting) -> bool:
    """Speak until all is said; False if the peer hangs up before."""
    words = greeting.begin()
    while True:
        if words:
            await stream.send_all(words)
        if greeting.is_over:
            return True
        data = await stream.receive_some(greeting.wanted_bytes)
        if not data:
            return False
        words = greeting.receive(bytes(data))


def _nonce(env: Env) -> bytes:
    return env.rng.getrandbits(8 * NONCE_BYTES).to_bytes(NONCE_BYTES, "big")
