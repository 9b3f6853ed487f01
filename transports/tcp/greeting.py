"""The greeting of a standing connection over a socket, both ends; `protocol/streams/membership.py` says how.

With a secret, TLS 1.3 carries it and what follows; both ends show a certificate of the secret's authority.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from trinamo.runtime.env import Env
from trinamo.runtime.errors import ConnectError, ImpostorError, RemoteProtocolError
from trinamo.runtime.protocol.streams.membership import (
    HELLO_BYTES,
    Purpose,
    check_hello,
    check_version,
    decode_welcome,
    encode_hello,
    encode_welcome,
    wanted_bytes,
)
from trinamo.transports.sockets.wire import SealedWire, Wire, open_wire, send_all, shake_hands

from .sockets import TcpOptions, dial

if TYPE_CHECKING:
    from trinamo.transports.security.identity import Shown


async def dial_member(
    address: str, options: TcpOptions, env: Env, purpose: Purpose
) -> tuple[Wire, str]:
    """Connect to a port of this cluster; the connection, and the name of who listens there.

    Connecting and greeting take at most `connect_timeout_s` each. A connection that breaks while it
    greets is made once more: nothing was said on it, and a caller may wait for this call. Raises
    `ConnectError`, as `ImpostorError` if it is no port of this cluster.
    """
    try:
        return await _dial_and_greet(address, options, env, purpose)
    except ConnectError as error:
        if not isinstance(error.__cause__, (ConnectionResetError, BrokenPipeError)):
            raise
    return await _dial_and_greet(address, options, env, purpose)


async def _dial_and_greet(
    address: str, options: TcpOptions, env: Env, purpose: Purpose
) -> tuple[Wire, str]:
    wire = open_wire(await dial(address, options))
    try:
        with trio.fail_after(options.connect_timeout_s):
            return await greet(wire, address, options, env, purpose)
    except trio.TooSlowError:
        wire.socket.close()
        raise ConnectError(
            f"{address} did not greet within {options.connect_timeout_s:g} s"
        ) from None
    except BaseException:
        wire.socket.close()
        raise


async def greet(
    wire: Wire, address: str, options: TcpOptions, env: Env, purpose: Purpose
) -> tuple[Wire, str]:
    """The dialler's end: what carries all that follows, and the listener's name. Bounded by its caller.

    Raises as `dial_member`, and leaves the connection open.
    """
    hello = encode_hello(purpose, sealed=bool(options.secret))
    try:
        await send_all(wire, hello)
        identity: Shown | None = None
        if options.secret:
            identity = options.shown(purpose.uri(""), env)
            wire = await _seal(wire, identity, dials=True)
        name = decode_welcome(await _hear(wire, lambda heard: wanted_bytes(heard, hello)), hello)
    except ssl.SSLCertVerificationError as error:
        raise ConnectError(
            f"{address} is of another cluster, or its {options.authority_key} is another:"
            f" {error.verify_message}"
        ) from error
    except ssl.SSLError as error:
        raise ImpostorError(f"{address} shook no hands: {error.reason}") from error
    except (EOFError, OSError) as error:
        raise ConnectError(
            f"{address} closed the connection before it was greeted: it is ending, or its "
            f"{options.authority_key} is another"
            + (", or a certificate of this role may not ask there" if options.fleet else "")
        ) from error
    except RemoteProtocolError as error:
        raise ImpostorError(f"{address}: {error.message}") from error
    if identity is not None:
        try:
            identity.check_listener(wire.peer, purpose, name)
        except ImpostorError as error:
            raise ImpostorError(f"{address}: {error.message}") from error
    return wire, name


async def welcome(wire: Wire, options: TcpOptions, env: Env, purpose: Purpose, name: str) -> Wire:
    """The listener's end: what carries all that follows. Whoever calls it bounds its time.

    Raises `RemoteProtocolError` or `OSError` for a peer that must be told nothing.
    """
    try:
        hello = await _hear(wire, lambda heard: HELLO_BYTES - len(heard))
        check_hello(hello, purpose, sealed=bool(options.secret))
        if options.secret:
            identity = options.shown(purpose.uri(name), env)
            wire = await _seal(wire, identity, dials=False)
            identity.check_dialler(wire.peer, purpose)
    except EOFError:
        raise RemoteProtocolError("the connection ended before its greeting") from None
    except ssl.SSLError as error:
        raise RemoteProtocolError(
            f"it shook no hands, or its {options.authority_key} is another: {error.reason}"
        ) from error
    except ConnectError as error:
        raise RemoteProtocolError(error.message) from error
    said = encode_welcome(hello, name)
    await send_all(wire, said if wire.seal is None else wire.seal(said))
    check_version(hello)
    return wire


async def _seal(wire: Wire, identity: Shown, *, dials: bool) -> Wire:
    """Shake hands: what is sealed, and knows who is at the other end."""
    session = identity.session(dials=dials)
    await shake_hands(wire, session)
    return SealedWire(wire, session, identity.peer_of(session))


async def _hear(wire: Wire, wanted: Callable[[bytes], int]) -> bytes:
    """So much as is wanted; `EOFError` if the peer hangs up before."""
    heard = b""
    while (count := wanted(heard)) > 0:
        data = await wire.receive(count)
        if not data:
            raise EOFError
        heard += data
    if count:
        raise RemoteProtocolError("it said more than was due")
    return heard
