"""TLS of a run draws from the seed: OpenSSL's dice, and what it takes from the machine's clock.

Python's `ssl` asks OpenSSL, which rolls dice of its own in C. For a run they are exchanged by
`RAND_set_rand_method` of the library that `ssl` has loaded. Each step of each TLS connection draws
from a generator of its own, because how much a step draws depends on what the process did before
(an RSA key keeps its blinding values for several signatures).

A server's session tickets hold the time, and are sealed with keys that the context drew when it was
made; both are set to the run's. What stays with the machine's clock: whether a certificate is valid,
and whether a session may be resumed, which one of a run never may: it is out of date.
"""

from __future__ import annotations

import _ssl
import ctypes
import random
import ssl
from collections.abc import Callable
from functools import cache
from typing import Any

from .ambient import Patch

STEPS = ("do_handshake", "read", "write", "unwrap")
TICKET_KEYS_BYTES = 80
_SSL_CTRL_SET_TLSEXT_TICKET_KEYS = 59
_BYTES = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_STATUS = ctypes.CFUNCTYPE(ctypes.c_int)
_ON_TICKET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
NO_SEAM = (
    f"TLS was used, and {ssl.OPENSSL_VERSION} as this Python has loaded it lets nobody choose its"
    " dice: two runs of one seed differ, and a failure does not replay exactly"
)


class Tls:
    """The stand-ins of one run. `stream` makes its generators, `advise` takes a hint."""

    def __init__(
        self,
        stream: Callable[[str], random.Random],
        wall: Callable[[], float],
        advise: Callable[[str], None],
    ) -> None:
        self._stream, self._wall, self._advise = stream, wall, advise
        self._dice: random.Random | None = None
        self._step: random.Random | None = None
        self._contexts: dict[int, ssl.SSLContext] = {}

    def stand_ins(self) -> list[Patch]:
        """Everything to be replaced: whose attribute, which, by what."""
        library = openssl()
        patches: list[Patch] = [(ssl.SSLContext, "wrap_bio", self._wrap_bio(library))]
        if library is not None:
            patches += [
                (library, "dice", self._draw),
                (library, "wall", self._wall),
                (library, "method", library.own_method),
                *((ssl.SSLObject, name, self._stepping(name)) for name in STEPS),
            ]
        return patches

    def _base(self) -> random.Random:
        # A stream is a column of the digest, and most runs have no TLS.
        if self._dice is None:
            self._dice = self._stream("tls")
        return self._dice

    def _draw(self, size: int) -> bytes:
        return (self._step or self._base()).randbytes(size)

    def _wrap_bio(self, library: OpenSSL | None) -> Callable[..., ssl.SSLObject]:
        real = ssl.SSLContext.wrap_bio

        def wrap_bio(context: ssl.SSLContext, *args: Any, **keywords: Any) -> ssl.SSLObject:
            if library is None and not self._contexts:
                self._advise(NO_SEAM)
            elif library is not None and id(context) not in self._contexts:
                library.prepare(context, self._base().randbytes(TICKET_KEYS_BYTES))
            self._contexts[id(context)] = context
            made = real(context, *args, **keywords)
            vars(made)["_trinamo_steps"] = random.Random(self._base().getrandbits(64))
            return made

        return wrap_bio

    def _stepping(self, name: str) -> Callable[..., Any]:
        real = getattr(ssl.SSLObject, name)

        def step(connection: ssl.SSLObject, *args: Any) -> Any:
            steps = vars(connection).get("_trinamo_steps") or self._base()
            before, self._step = self._step, random.Random(steps.getrandbits(64))
            try:
                return real(connection, *args)
            finally:
                self._step = before

        return step


class _Method(ctypes.Structure):
    """OpenSSL's `RAND_METHOD`."""

    _fields_ = [  # type: ignore[mutable-override]  # as ctypes wants it
        ("seed", ctypes.c_void_p),
        ("bytes", _BYTES),
        ("cleanup", ctypes.c_void_p),
        ("add", ctypes.c_void_p),
        ("pseudorand", _BYTES),
        ("status", _STATUS),
    ]


class OpenSSL:
    """The library that `ssl` has loaded, for the whole process.

    `dice` answers so many bytes and `wall` Unix seconds, while there is a run. Raises
    `AttributeError` or `OSError` if the library lets nobody choose them.
    """

    dice: Callable[[int], bytes] | None = None
    wall: Callable[[], float] | None = None

    def __init__(self) -> None:
        # Where it is a part of Python itself, there is no file.
        library = ctypes.CDLL(getattr(_ssl, "__file__", None))
        number, pointer = ctypes.c_long, ctypes.c_void_p

        def function(name: str, result: Any, *arguments: Any) -> Any:
            return ctypes.CFUNCTYPE(result, *arguments)((name, library))

        self._get_method = function("RAND_get_rand_method", pointer)
        self._set_method = function("RAND_set_rand_method", ctypes.c_int, pointer)
        self._control = function(
            "SSL_CTX_ctrl", number, pointer, ctypes.c_int, number, ctypes.c_char_p
        )
        self._set_on_ticket = function(
            "SSL_CTX_set_session_ticket_cb", ctypes.c_int, pointer, _ON_TICKET, pointer, pointer
        )
        self._session_of = function("SSL_get_session", pointer, pointer)
        self._set_time = function("SSL_SESSION_set_time", number, pointer, number)
        draw = _BYTES(self._draw)
        self._methods = _Method(None, draw, None, None, draw, _STATUS(lambda: 1))
        self._on_ticket = _ON_TICKET(self._stamp)
        self.own_method = ctypes.addressof(self._methods)
        """The address of the method that draws from `dice`."""

    @property
    def method(self) -> int:
        """The address of the `RAND_METHOD` by which OpenSSL draws."""
        method: int = self._get_method()
        return method

    @method.setter
    def method(self, method: int) -> None:
        self._set_method(method)

    def prepare(self, context: ssl.SSLContext, keys: bytes) -> None:
        """Seal the tickets of `context` with `keys`; while there is a run, they hold its time."""
        # The first field of Python's object is the `SSL_CTX`.
        pointer = ctypes.c_void_p.from_address(id(context) + object.__basicsize__)
        self._control(pointer, _SSL_CTRL_SET_TLSEXT_TICKET_KEYS, len(keys), keys)
        self._set_on_ticket(pointer, self._on_ticket, None, None)

    def _draw(self, buffer: int, size: int) -> int:
        assert self.dice is not None
        ctypes.memmove(buffer, self.dice(size), size)
        return 1

    def _stamp(self, connection: int, _data: int) -> int:
        if self.wall is not None:
            self._set_time(self._session_of(connection), int(self.wall()))
        return 1


@cache
def openssl() -> OpenSSL | None:
    """The loaded library; None if it has no such functions."""
    try:
        return OpenSSL()
    except (AttributeError, OSError):
        return None
