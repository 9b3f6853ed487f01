"""Mutated streams of requests against our own server, whole connections in memory. A command too.

    python -m tests.transports.http.http1.fuzz --inputs 10000000 --seed 1

An input is what one connection sends: one to three requests from a grammar that knows what smugglers
send, a few bytes of it changed, cut into reads anywhere. The same seed makes the same inputs. What
must hold of each: no exception, nothing that waits on after the client's FIN, bounded buffers, no
request after a refusal. Of every eighth: the requests are the same however the bytes are cut. Of
every sixteenth: h11 under our rules finds each of them too, so that no other reader in front of this
one takes two requests for one, or one for two.
"""

from __future__ import annotations

import argparse
import logging
import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import attrs
import trio
import trio.testing

from tests.transports.http.http1.other_reader import Request, normal, read_by_h11
from tests.transports.http.http1.served import FixedClock, MemorySocket
from trinamo.runtime.config.http import HttpConfig
from trinamo.runtime.nurseries import open_nursery
from trinamo.transports.http.driver import HostPolicy, NativeDriver
from trinamo.transports.http.http1.connection import READ_AHEAD_BYTES_MAX, Http1Connection
from trinamo.transports.http.refusals import Refusals

BATCH: Final = 64
HEADER_BYTES_MAX: Final = 2048
CONFIG: Final = HttpConfig(header_bytes_max=HEADER_BYTES_MAX)

METHODS = (b"GET", b"POST", b"POST", b"PUT", b"HEAD", b"OPTIONS", b"get", b"CONNECT", b"FOO", b"")
TARGETS = (
    *(b"/", b"/a", b"/a?b=c", b"/%41", b"*", b"http://localhost/a", b"//a", b"/\xc3\xa9", b"a"),
    *(b"/a#b", b"/a b", b"", b"/" + b"a" * 3000, b"localhost:80"),
)
VERSIONS = (
    *(b"HTTP/1.1",) * 12,
    *(b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.2", b"http/1.1", b"HTTP/1.10", b"HTTP/1", b""),
)
FIELDS = (
    *(b"Host: localhost\r\n",) * 6,
    *(b"host: a\r\n", b"Host:\r\n", b"host : localhost\r\n", b"Host: a b\r\n", b" Host: a\r\n"),
    *(
        b"X-A: b\r\n",
        b"x-a:b \t\r\n",
        b"x-a: \xff\x80\r\n",
        b"x-a: \x00\r\n",
        b"x-a: b\n",
        b"x-a\r\n",
    ),
    *(
        b": a\r\n",
        b"x a: b\r\n",
        b"x-a: b\r\n c\r\n",
        b"\tx: y\r\n",
        b"x-a: b\r\r\n",
        b"x\xff: a\r\n",
    ),
    *(b"Connection: close\r\n", b"Connection: keep-alive\r\n", b"Expect: 100-continue\r\n"),
    *(
        b"Upgrade: h2c\r\nConnection: upgrade\r\n",
        b"TE: trailers\r\n",
        b"x: " + b"y" * 500 + b"\r\n",
    ),
)
LENGTHS = (
    *(b"5", b"5", b"5", b"0", b"05", b"+5", b"-5", b"5,5", b"5, 6", b"0x5", b"5 ", b"\x0b5", b""),
    *(b"99999999999999999999", b"5_0", b"\xb2", b"5;a"),
)
CODINGS = (
    *(b"chunked",) * 6,
    *(b"Chunked", b"xchunked", b"chunked, chunked", b"identity", b"gzip, chunked", b"chunked;a=b"),
    *(b"\x0bchunked", b"chunked\t", b"", b",chunked", b'"chunked"'),
)
SIZES = (
    *(b"5",) * 8,
    *(b"05", b"5;a", b'5;a="b"', b"5 ", b" 5", b"+5", b"-5", b"0x5", b"5\t;a", b"", b"5;\x00"),
    *(b"ffffffffffffffff", b"10000000000000005", b"5;" + b"a" * 300, b"5\n", b"5\r", b"G", b"5_0"),
)
TAILS = (b"0\r\n\r\n",) * 6 + (
    *(b"0\r\nx: y\r\n\r\n", b"0\r\nContent-Length: 5\r\n\r\n", b"0\n\n", b"00;a\r\n\r\n", b"0\r\n"),
    *(b"0\r\n x: y\r\n\r\n", b"0\r\nx : y\r\n\r\n", b"0\r\n\n"),
)
SPLICES = (
    *(
        b"\r\n",
        b"\n",
        b"\r",
        b"\x00",
        b" ",
        b"\t",
        b":",
        b";",
        b"0",
        b"\xff",
        b"\r\n\r\n",
        b"\r\n ",
    ),
    *(b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n", b"GET /x HTTP/1.1\r\n", b"\x0b"),
    *(
        b"GET /y HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ),
)


def _make_request(rng: random.Random) -> bytes:
    is_odd = rng.random() < 0.5
    method = rng.choice(METHODS if is_odd else METHODS[:4])
    target = rng.choice(TARGETS if is_odd else TARGETS[:4])
    version = rng.choice(VERSIONS if is_odd else VERSIONS[:1])
    fields = [b"Host: localhost\r\n"]
    fields += rng.choices(FIELDS if is_odd else FIELDS[:1], k=rng.randrange(4) if is_odd else 0)
    body = b""
    framing = rng.randrange(4)
    if framing & 1:
        fields.append(b"Content-Length: %b\r\n" % rng.choice(LENGTHS if is_odd else LENGTHS[:3]))
        body = b"hello"
    if framing & 2 and (framing == 2 or is_odd):
        coding = rng.choice(CODINGS if is_odd else CODINGS[:6])
        fields.append(b"Transfer-Encoding: %b\r\n" % coding)
        sizes = rng.choices(SIZES if is_odd else SIZES[:8], k=rng.randrange(3))
        body = b"".join(b"%b\r\nhello\r\n" % size for size in sizes) + rng.choice(TAILS)
    if is_odd:
        rng.shuffle(fields)
    return b"%b %b %b\r\n%b\r\n%b" % (method, target, version, b"".join(fields), body)


def _mutate(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data) + 1)
    match rng.randrange(6):
        case 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        case 1 | 2:
            data[at:at] = rng.choice(SPLICES)
        case 3:
            del data[at : at + rng.randrange(1, 8)]
        case 4:
            data[at:at] = data[at : at + rng.randrange(1, 40)]
        case _:
            del data[at:]


def make_input(rng: random.Random) -> bytes:
    """What one connection sends."""
    data = bytearray(b"".join(_make_request(rng) for _ in range(rng.randrange(1, 4))))
    for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
        _mutate(rng, data)
    return bytes(data)


def cut(rng: random.Random, data: bytes) -> list[bytes]:
    """`data` as reads bring it."""
    how = rng.randrange(64)
    if how < 24 or not data:
        return [data]
    if how == 24:
        return [data[at : at + 1] for at in range(len(data))]
    ends = sorted(rng.choices(range(len(data) + 1), k=rng.randrange(1, 6)))
    pieces = [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]
    return [piece for piece in pieces if piece]


class ViolationError(AssertionError):
    """An input after which something does not hold."""

    def __init__(self, what: str, pieces: list[bytes]) -> None:
        super().__init__(f"{what}: {pieces!r}")
        self.pieces = pieces


class _Socket(MemorySocket):
    def __init__(self, number: int, pieces: list[bytes]) -> None:
        super().__init__()
        self.number = number
        self._arrived.extend(pieces)

    def getpeername(self) -> tuple[str, int]:
        return "192.0.2.1", self.number


@attrs.define(eq=False)
class _Played:
    pieces: list[bytes]
    socket: _Socket
    connection: Http1Connection
    requests: list[Request] = attrs.field(factory=list)
    is_over: bool = False


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class Fuzz:
    """Plays inputs and judges them; one object for many."""

    def __init__(self) -> None:
        self._played: dict[int, _Played] = {}
        self._errors = _Errors()
        self.requests = 0
        """How many were answered: what mutation leaves whole."""
        hosts = HostPolicy.make("127.0.0.1", ["*"])
        refusals = Refusals(FixedClock(), random.Random(0))
        self._driver = NativeDriver(
            self._answer, {}, CONFIG, hosts, refusals, lambda _connection: None
        )

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            if not message["more_body"]:
                break
        target = scope["raw_path"] + (
            b"?" + scope["query_string"] if scope["query_string"] else b""
        )
        played = self._played[scope["client"][1]]
        played.requests.append((scope["method"].encode(), target, body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def play(self, inputs: list[list[bytes]]) -> list[list[Request]]:
        """The requests that each input is; raises `ViolationError`."""
        log = logging.getLogger("trinamo.http")
        log.addHandler(self._errors)
        try:
            async with open_nursery() as nursery:
                for number, pieces in enumerate(inputs):
                    played = self._open(number, pieces)
                    nursery.start_soon(self._drive, played)
                # What came is dealt with; now the clients leave.
                await trio.testing.wait_all_tasks_blocked()
                for played in self._played.values():
                    _check_bounds(played)
                    played.socket.arrive(b"")
                await trio.testing.wait_all_tasks_blocked()
                for played in self._played.values():
                    self._judge(played)
            return [played.requests for played in self._played.values()]
        finally:
            log.removeHandler(self._errors)

    def _open(self, number: int, pieces: list[bytes]) -> _Played:
        socket = _Socket(number, pieces)
        stream: Any = SimpleNamespace(socket=socket)
        connection = self._driver.open(stream)
        assert isinstance(connection, Http1Connection)
        played = self._played[number] = _Played(pieces, socket, connection)
        return played

    async def _drive(self, played: _Played) -> None:
        try:
            await played.connection.serve()
        except Exception as error:
            raise ViolationError(f"it raised {error!r}", played.pieces) from error
        played.is_over = True

    def _judge(self, played: _Played) -> None:
        if self._errors.records:
            raise ViolationError(self._errors.records[0].getMessage(), played.pieces)
        if not played.is_over:
            raise ViolationError("it waits although its client has left", played.pieces)
        sent = bytes(played.socket.sent)
        statuses = [part[:3] for part in sent.split(b"HTTP/1.1 ")[1:] if part[:3] != b"100"]
        if sent and not sent.startswith(b"HTTP/1.1 "):
            raise ViolationError(f"it said {sent!r}", played.pieces)
        if statuses[: len(played.requests)] != [b"200"] * len(played.requests):
            # The Host header of another name is an answer too, and no request for an application.
            told = [status for status in statuses if status not in (b"200", b"421")]
            if len(told) > 1 or (told and statuses[-1] != told[0]):
                raise ViolationError(f"it answered {statuses}", played.pieces)
        self.requests += len(played.requests)


def _check_bounds(played: _Played) -> None:
    size = sum(map(len, played.pieces))
    if len(played.socket.sent) > 4096 + 64 * size:
        raise ViolationError(f"it sent {len(played.socket.sent)} bytes", played.pieces)
    if len(played.connection._buffer) > READ_AHEAD_BYTES_MAX:
        raise ViolationError("its buffer is above the bound", played.pieces)


def _batches(rng: random.Random, inputs: int) -> Iterator[list[bytes]]:
    for start in range(0, inputs, BATCH):
        yield [make_input(rng) for _ in range(min(BATCH, inputs - start))]


async def fuzz(inputs: int, seed: int, *, told_every: int = 0) -> Fuzz:
    """Play so many inputs. Raises `ViolationError`, which names the input."""
    rng = random.Random(seed)
    played = Fuzz()
    began, done = time.process_time(), 0
    for batch in _batches(rng, inputs):
        cuts = [cut(rng, data) for data in batch]
        found = await played.play(cuts)
        again = batch[:: BATCH // 8]
        for data, requests in zip(again, await played.play([[d] for d in again]), strict=False):
            if requests != found[batch.index(data)]:
                raise ViolationError(f"whole it is {requests}", cuts[batch.index(data)])
        for number in range(0, len(batch), BATCH // 4):
            read = read_by_h11(batch[number], HEADER_BYTES_MAX)
            known = [normal(request) for request in read if request is not None]
            ours = [normal(request) for request in found[number]]
            if None in read:
                ours = ours[: len(known)]
            if ours != known[: len(ours)]:
                raise ViolationError(f"h11 finds {known}, we found {ours}", [batch[number]])
        done += len(batch)
        if told_every and done // told_every != (done - len(batch)) // told_every:
            used = time.process_time() - began
            rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            print(
                f"{done} inputs, {played.requests} requests, {used:.0f} s of CPU, {rss} MiB",
                flush=True,
            )
    return played


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, help="where to write an input that was found")
    given = parser.parse_args()
    try:
        trio.run(lambda: fuzz(given.inputs, given.seed, told_every=max(1, given.inputs // 100)))
    except BaseException as error:
        if isinstance(error, ViolationError) and given.save is not None:
            given.save.write_text(repr(error.pieces), "utf-8")
        raise


if __name__ == "__main__":
    main()
