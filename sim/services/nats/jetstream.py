"""The part of JetStream that work queues ask for: streams, one pull consumer each, and its timers.

What it holds is the disk of the broker: it outlives the process, but for the pulls that wait. There are
no replicas; a stream between two leaders is played by the broker (`SimulatedNats.refuse`). Requests and
answers are those of the real server, error codes and all: `transports/nats/queue` is held to both by
`tests/conformance/events`. Read beside it: docs.nats.io, "JetStream wire API reference".

What this module does not do: push consumers, mirrors, limits in bytes, anything that no queue asks.
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Final, Protocol

import attrs
import trio

from ...core.host import WALL_EPOCH_S
from ..machine import MachineClock
from .wire import Publish, matches, status

API: Final = "$JS.API."
ACK: Final = "$JS.ACK."
NEXT: Final = f"{API}CONSUMER.MSG.NEXT."
NAMES_PAGE: Final = 1024
ROUNDING_S: Final = 1e-6
"""A clock's rounding must not make a moment that is due appear to be just ahead, for ever."""
_NS: Final = 1_000_000_000
_NEVER: Final = "0001-01-01T00:00:00Z"


class Send(Protocol):
    """How an answer goes out; whether anybody was there to get it. See `Broker.send`."""

    def __call__(self, message: Publish, *, shown_as: str = "", op: str = "") -> bool: ...


class ApiError(Exception):
    """What JetStream refuses, with its own number for why."""

    def __init__(self, number: int, words: str) -> None:
        super().__init__(words)
        self.number = number

    def answer(self) -> dict[str, Any]:
        return {"error": {"code": 400, "err_code": self.number, "description": str(self)}}


@attrs.frozen(eq=False)
class Stored:
    """One message of a stream."""

    sequence: int
    message: Publish
    stored_s: float
    """By the server's clock, since the epoch."""


@attrs.define(eq=False)
class Consumer:
    """The takers of one stream."""

    config: dict[str, Any]
    delivered: dict[int, int] = attrs.field(factory=dict)
    """How often each message was handed out."""
    due: dict[int, float] = attrs.field(factory=dict)
    """When each one that was handed out is to be handed out again, on the machine's clock."""
    pulls: deque[tuple[str, float]] = attrs.field(factory=deque)
    """Who waits, and until when; 0 for not at all. Lost with the process."""
    count: int = 0

    @property
    def ack_wait_s(self) -> float:
        return float(self.config["ack_wait"]) / _NS

    def forget(self, sequence: int) -> None:
        """The message is gone."""
        self.delivered.pop(sequence, None)
        self.due.pop(sequence, None)


class Stream:
    """The messages of some subjects, in order."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.last = 0
        self.messages: OrderedDict[int, Stored] = OrderedDict()
        self.by_subject: dict[str, int] = {}
        self.consumers: dict[str, Consumer] = {}
        self._ids: dict[str, tuple[int, float]] = {}

    def wants(self, tokens: list[str]) -> bool:
        """Whether messages of this subject are kept here."""
        return any(matches(each.split("."), tokens) for each in self.config["subjects"])

    def of(self, subject: str) -> Stored | None:
        """The last message of this subject."""
        return self.messages.get(self.by_subject.get(subject, 0))

    def booted(self) -> None:
        """The process is a new one: pulls are lost, and the ids of messages that are gone."""
        for consumer in self.consumers.values():
            consumer.pulls.clear()
        self._ids = {name: known for name, known in self._ids.items() if known[0] in self.messages}

    def remove(self, sequence: int) -> bool:
        """Delete a message; whether it was there."""
        stored = self.messages.pop(sequence, None)
        if stored is None:
            return False
        if self.by_subject.get(stored.message.subject) == sequence:
            del self.by_subject[stored.message.subject]
        for consumer in self.consumers.values():
            consumer.forget(sequence)
        return True

    def store(self, message: Publish, wall_s: float) -> dict[str, Any]:
        """Keep a message; what is answered. Raises `ApiError`."""
        config, headers = self.config, message.headers
        name, window_s = headers.get("Nats-Msg-Id"), config.get("duplicate_window", 0) / _NS
        self._age(wall_s)
        if name is not None and name in self._ids:
            sequence, known_s = self._ids[name]
            if wall_s - known_s < window_s:
                return {"stream": config["name"], "seq": sequence, "duplicate": True}
        had = self.by_subject.get(message.subject, 0)
        expected = headers.get("Nats-Expected-Last-Subject-Sequence")
        if expected is not None and int(expected) != had:
            raise ApiError(10071, f"wrong last sequence: {had}")
        self._make_room(had)
        self.last += 1
        self.messages[self.last] = Stored(self.last, message, wall_s)
        self.by_subject[message.subject] = self.last
        if name is not None and window_s:
            self._ids[name] = (self.last, wall_s)
        return {"stream": config["name"], "seq": self.last}

    def _make_room(self, had: int) -> None:
        is_full = 0 < self.config["max_msgs"] <= len(self.messages)
        if had and self.config["max_msgs_per_subject"] == 1:
            if self.config["discard"] == "new":
                raise ApiError(10077, "maximum messages per subject exceeded")
            self.remove(had)
        elif is_full and self.config["discard"] == "new":
            raise ApiError(10077, "maximum messages exceeded")
        elif is_full:
            self.remove(next(iter(self.messages)))

    def _age(self, wall_s: float) -> None:
        age_s = self.config.get("max_age", 0) / _NS
        while age_s and self.messages:
            first = next(iter(self.messages.values()))
            if first.stored_s + age_s > wall_s:
                return
            self.remove(first.sequence)

    def info(self, wall_s: float) -> dict[str, Any]:
        """What `STREAM.INFO` says."""
        self._age(wall_s)
        first = next(iter(self.messages.values()), None)
        state = {
            "messages": len(self.messages),
            "first_seq": first.sequence if first else self.last + 1,
            "first_ts": _time(first.stored_s) if first else _NEVER,
            "last_seq": self.last,
            "consumer_count": len(self.consumers),
        }
        return {"config": self.config, "created": _time(WALL_EPOCH_S), "state": state}


class JetStream:
    """All streams of one disk. `take` answers requests, `run` hands messages out."""

    def __init__(self, clock: MachineClock) -> None:
        self.streams: dict[str, Stream] = {}
        self._clock = clock
        self._stirred = trio.lowlevel.ParkingLot()

    def wall(self) -> float:
        """Seconds since the epoch by the server's clock."""
        return WALL_EPOCH_S + self._clock.now()

    def booted(self) -> None:
        """The process is a new one."""
        for stream in self.streams.values():
            stream.booted()

    def stir(self) -> None:
        """Look again who may be handed something."""
        self._stirred.unpark_all()

    async def run(self, send: Send, is_leaderless: Callable[[], bool]) -> None:
        """Hand out, in the order of the pulls, and end those whose time is over."""
        while True:
            due_s = math.inf
            if not is_leaderless():
                consumers = [(s, c) for s in self.streams.values() for c in s.consumers.values()]
                due_s = min((self._feed(*each, send) for each in consumers), default=math.inf)
            with trio.move_on_at(self._clock.world_time(due_s + ROUNDING_S)):
                await self._stirred.park()

    def _feed(self, stream: Stream, consumer: Consumer, send: Send) -> float:
        """When it has something to do again, if nothing comes before."""
        now_s = self._clock.now()
        pulls, consumer.pulls = consumer.pulls, deque()
        for reply, until_s in pulls:
            if until_s and until_s <= now_s:
                send(Publish(reply, head=status(408, "Request Timeout")))
                continue
            ready = next(
                (s for s in stream.messages.values() if consumer.due.get(s.sequence, 0) <= now_s),
                None,
            )
            if ready is not None:
                self._hand_out(stream, consumer, ready, reply, send)
            elif until_s:
                consumer.pulls.append((reply, until_s))
            else:
                send(Publish(reply, head=status(404, "No Messages")))
        times = [until_s for _, until_s in consumer.pulls]
        if times:
            times += [due_s for due_s in consumer.due.values() if due_s > now_s]
        return min(times, default=math.inf)

    def _hand_out(
        self, stream: Stream, consumer: Consumer, stored: Stored, reply: str, send: Send
    ) -> None:
        sequence, often = stored.sequence, consumer.delivered.get(stored.sequence, 0) + 1
        names = f"{stream.config['name']}.{consumer.config['durable_name']}"
        numbers = f"{often}.{sequence}.{consumer.count + 1}.{int(stored.stored_s * _NS)}.0"
        message = attrs.evolve(stored.message, subject=reply, reply=f"{ACK}{names}.{numbers}")
        # Where nobody waits for this pull any more, it is the next one's, as if it was never asked.
        if send(message, shown_as=stored.message.subject):
            consumer.count += 1
            consumer.delivered[sequence] = often
            consumer.due[sequence] = self._clock.now() + consumer.ack_wait_s

    # --- requests ------------------------------------------------------------------------------

    def takes(self, subject: str) -> bool:
        """Whether messages of this subject are for a stream, or ask JetStream something."""
        if subject.startswith((API, ACK)):
            return True
        return self._stream_of(subject) is not None

    def _stream_of(self, subject: str) -> Stream | None:
        tokens = subject.split(".")
        return next((each for each in self.streams.values() if each.wants(tokens)), None)

    def take(self, message: Publish, send: Send) -> None:
        """Do what a message asks, and answer it."""
        subject = message.subject
        if subject.startswith(NEXT):
            self._pull(message, send)
        elif subject.startswith(ACK):
            self._acknowledge(subject.split("."), message.payload)
            send(Publish(message.reply), op="ack")
        else:
            op, answer = "store", {}
            try:
                if subject.startswith(API):
                    asked = subject.removeprefix(API).split(".")
                    op = ".".join(asked[:2])
                    answer = self._call(op, asked, json.loads(message.payload or b"{}"))
                elif (stream := self._stream_of(subject)) is not None:
                    kept = attrs.evolve(message, reply="")
                    answer = stream.store(kept, self.wall())
            except ApiError as error:
                answer = error.answer()
            send(Publish(message.reply, json.dumps(answer).encode()), op=op)
        self.stir()

    def _pull(self, message: Publish, send: Send) -> None:
        stream_name, _, name = message.subject.removeprefix(NEXT).partition(".")
        stream = self.streams.get(stream_name)
        consumer = None if stream is None else stream.consumers.get(name)
        if consumer is None:
            send(Publish(message.reply, head=status(503)))
        elif len(consumer.pulls) >= consumer.config["max_waiting"]:
            send(Publish(message.reply, head=status(409, "Exceeded MaxWaiting")))
        else:
            asked = json.loads(message.payload or b"{}")
            is_patient = not asked.get("no_wait")
            until_s = self._clock.now() + asked.get("expires", 5 * _NS) / _NS if is_patient else 0.0
            consumer.pulls.append((message.reply, until_s))

    def _acknowledge(self, tokens: list[str], word: bytes) -> None:
        stream = self.streams.get(tokens[2])
        consumer = None if stream is None else stream.consumers.get(tokens[3])
        if stream is None or consumer is None:
            return
        sequence, now_s = int(tokens[5]), self._clock.now()
        if word in (b"", b"+ACK"):
            stream.remove(sequence)
        elif sequence in consumer.due and word == b"+WPI":
            consumer.due[sequence] = now_s + consumer.ack_wait_s
        elif sequence in consumer.due and word.startswith(b"-NAK"):
            delay_ns = json.loads(word[4:])["delay"] if len(word) > 4 else 0
            consumer.due[sequence] = now_s + delay_ns / _NS

    # --- the API -------------------------------------------------------------------------------

    def _call(self, op: str, asked: list[str], body: dict[str, Any]) -> dict[str, Any]:
        if op == "STREAM.NAMES":
            names, start = sorted(self.streams), body.get("offset", 0)
            return {"streams": names[start : start + NAMES_PAGE], "total": len(names)}
        if op == "STREAM.CREATE":
            stream = self.streams.setdefault(asked[2], Stream(body))
            if stream.config != body:
                words = "stream name already in use with a different configuration"
                raise ApiError(10058, words)
            return stream.info(self.wall())
        stream_of = self.streams.get(
            asked[3] if op in ("STREAM.MSG", "CONSUMER.DURABLE") else asked[2]
        )
        if stream_of is None:
            raise ApiError(10059, "stream not found")
        return self._call_of(stream_of, op, asked, body)

    def _call_of(
        self, stream: Stream, op: str, asked: list[str], body: dict[str, Any]
    ) -> dict[str, Any]:
        match op:
            case "STREAM.UPDATE":
                stream.config = body
                return stream.info(self.wall())
            case "STREAM.INFO":
                return stream.info(self.wall())
            case "STREAM.PURGE":
                pattern = body.get("filter", ">").split(".")
                gone = [
                    number
                    for number, stored in stream.messages.items()
                    if matches(pattern, stored.message.subject.split("."))
                ]
                return {"success": True, "purged": sum(map(stream.remove, gone))}
            case "STREAM.MSG" if asked[2] == "DELETE":
                if not stream.remove(body["seq"]):
                    raise ApiError(10057, "no message found")
                return {"success": True}
            case "STREAM.MSG":
                return _found(_sought(stream, body))
            case "CONSUMER.DURABLE":
                consumer = stream.consumers.setdefault(asked[4], Consumer(body["config"]))
                consumer.config = body["config"]
                return {"name": asked[4], "config": consumer.config}
            case "CONSUMER.INFO":
                known = stream.consumers.get(asked[3])
                if known is None:
                    raise ApiError(10014, "consumer not found")
                return {"name": asked[3], "num_ack_pending": len(known.due)}
            case _:
                raise ApiError(10000, f"this broker is simulated and has no {op}")


def _sought(stream: Stream, body: dict[str, Any]) -> Stored | None:
    if "last_by_subj" in body:
        return stream.of(body["last_by_subj"])
    if "next_by_subj" not in body:
        return stream.messages.get(body["seq"])
    pattern = body["next_by_subj"].split(".")
    return next(
        (
            stored
            for number, stored in stream.messages.items()
            if number >= body.get("seq", 0) and matches(pattern, stored.message.subject.split("."))
        ),
        None,
    )


def _found(stored: Stored | None) -> dict[str, Any]:
    if stored is None:
        raise ApiError(10037, "no message found")
    message = stored.message
    found = {
        "subject": message.subject,
        "seq": stored.sequence,
        "time": _time(stored.stored_s),
        "data": base64.b64encode(message.payload).decode(),
    }
    if message.head:
        found["hdrs"] = base64.b64encode(message.head).decode()
    return {"message": found}


def _time(wall_s: float) -> str:
    seconds, rest = divmod(wall_s, 1)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(rest * 1e6):06d}Z"
