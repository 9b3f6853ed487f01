"""Clients of a simulated cluster: what they are asked to do, and those over HTTP, with httpx.

A client host asks one request after the other, waits for its end, and writes down what it saw in
a `ClientRecord`; the checkers compare that with what the engines did. How a client misbehaves (it
quits, stops, kills or drops after so many tokens, reads slowly) is part of its `ClientProfile`.

Clients that are members of the cluster are in `members.py`, those that speak nonsense on purpose in
`byzantine.py`.
"""

from __future__ import annotations

import json
import random
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import attrs
import httpx
import trio

from trinamo.runtime.context import Reason
from trinamo.runtime.engines.mocker.engine import expected_text
from trinamo.runtime.protocol.openai.answers import DONE_DATA
from trinamo.runtime.protocol.openai.generate import ChatMessage, GenerateRequest
from trinamo.transports.openai.events import EventSplitter

from .engines import DEAF_WORD, RAISE_WORD
from .roles import HTTP_PORT, MODEL, Process

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


Via = Literal["http", "runtime", "exchange"]
"""How a client asks: a frontend, a worker through the runtime, or a worker to which it streams input."""
COMPLETE: Final = "complete"
VOWELS: Final = b"aeiou"
"""Tokens that end an answer, if its client asks for that."""


@attrs.frozen(kw_only=True)
class ClientProfile:
    """How the clients of one group behave. Numbers of tokens that are -1 mean never.

    Pairs are ranges, drawn evenly, both ends included.
    """

    via: Via = "http"
    clients: int = 1
    requests: int = 1
    """Of each client, one after the other."""
    to: str = "frontend0"
    start_s: float = 0.0
    pause_s: tuple[float, float] = (0.0, 0.02)
    """Before each request."""
    prompt_words: tuple[int, int] = (1, 20)
    output_tokens: tuple[int, int] = (5, 20)
    stream: bool = True
    choices: int = 1
    """How many answers to one question, over HTTP; all are alike."""
    timeout_s: float = 60.0
    """A client over HTTP waits so long for the next byte, one of the cluster for the whole."""
    read_pause_s: float = 0.0
    """What a slow reader does after each piece."""
    stall_after: int = -1
    """Read nothing for `stall_s`, once."""
    stall_s: float = 0.0
    quit_after: int = -1
    """Close the connection."""
    quit_after_s: float = -1.0
    """Close the connection so long after the question, answered or not."""
    stop_after: int = -1
    kill_after: int = -1
    drop_after: int = -1
    """Leave the iterator."""
    stop_reason: Reason = Reason.STOP_REQUESTED
    kill_reason: Reason = Reason.CLIENT_DISCONNECT
    raise_after: int = -1
    """Have the engine fail."""
    min_tokens: int = -1
    """Have vowels end each answer, once there are so many tokens."""
    is_deaf: bool = False
    """Have the engine hear no Stop."""
    input_pause_s: float = 0.0
    """In an exchange: before each item of input, one for each token of the answer."""
    input_bytes: int = 0
    """Of each item of input, beside its token."""
    cut_input_after: int = -1
    """Leave after so many items of input, which then is not complete."""

    @property
    def is_slow(self) -> bool:
        """Whether what comes is not read at once, or a Stop not heeded."""
        return bool(self.read_pause_s) or self.stall_after >= 0 or self.is_deaf


@attrs.define
class ClientRecord:
    """One request as its client saw it."""

    name: str
    client: str
    via: Via
    profile: ClientProfile
    output_tokens: int
    request: GenerateRequest
    started_s: float = 0.0
    ended_s: float | None = None
    status: int = 0
    """Of the HTTP answer; 0 if none came."""
    text: str = ""
    finish_reason: str = ""
    terminals: list[str] = attrs.Factory(list)
    """Every end the client was told, in order; exactly one is right."""
    late: int = 0
    """Items after the end."""
    others: dict[int, str] = attrs.Factory(dict)
    """The texts of further choices, by index."""
    ended_choices: list[int] = attrs.Factory(list)
    """The choices that were given a finish reason, in that order."""

    @property
    def outcome(self) -> str:
        """The first end the client was told; empty while there is none."""
        return self.terminals[0] if self.terminals else ""

    @property
    def expected(self) -> str:
        """The whole answer a correct cluster gives."""
        return expected_text(self.request, self.output_tokens)


def make_request(
    name: str, profile: ClientProfile, rng: random.Random
) -> tuple[GenerateRequest, int]:
    """A request called `name`, and the number of tokens it asks for."""
    words = [f"w{rng.randrange(1000)}" for _ in range(rng.randint(*profile.prompt_words))]
    if profile.raise_after >= 0:
        words.append(f"{RAISE_WORD}{profile.raise_after}")
    if profile.is_deaf:
        words.append(DEAF_WORD)
    tokens = rng.randint(*profile.output_tokens)
    message = ChatMessage("user", " ".join([name, *words]))
    ends: dict[str, Any] = {}
    if profile.min_tokens >= 0:
        ends = {"min_tokens": profile.min_tokens, "stop_token_ids": list(VOWELS)}
    return GenerateRequest(model=MODEL, messages=[message], max_tokens=tokens, **ends), tokens


class SimulatedClient:
    """What all kinds of client share: the requests, one by one, and their records."""

    def __init__(
        self,
        process: Process,
        profile: ClientProfile,
        rng: random.Random,
        records: list[ClientRecord],
    ) -> None:
        self.process, self.profile = process, profile
        self._rng, self._records = rng, records

    async def pause_and_begin(self, number: int) -> ClientRecord:
        """The next request, after the pause before it."""
        await trio.sleep(self._rng.uniform(*self.profile.pause_s))
        name = f"{self.process.name}.{number}"
        request, tokens = make_request(name, self.profile, self._rng)
        record = ClientRecord(
            name, self.process.name, self.profile.via, self.profile, tokens, request,
            started_s=trio.current_time(),
        )  # fmt: skip
        self._records.append(record)
        self.process.note("request.begin", request=name, tokens=tokens)
        return record

    async def linger(self, record: ClientRecord, seen: int) -> None:
        """Read as slowly as the profile says, after what has come since `seen` tokens."""
        profile = self.profile
        await trio.sleep(profile.read_pause_s)
        if seen < profile.stall_after <= len(record.text):
            await trio.sleep(profile.stall_s)

    def take(self, record: ClientRecord, text: str) -> None:
        """Some tokens came: one character each."""
        if record.terminals:
            record.late += 1
        for token in text:
            self.process.note("stream.token", request=record.name, index=len(record.text))
            record.text += token

    def end(self, record: ClientRecord, terminal: str) -> None:
        """The client was told, or decided, that this request is over."""
        record.terminals.append(terminal)
        if record.ended_s is None:
            record.ended_s = trio.current_time()
        self.process.note(
            "request.end", request=record.name, outcome=terminal, tokens=len(record.text)
        )


async def ask_over_http(
    process: Process, profile: ClientProfile, rng: random.Random, records: list[ClientRecord]
) -> None:
    """The main function of a client host that speaks HTTP."""
    client = _HttpClient(process, profile, rng, records)
    await trio.sleep(profile.start_s)
    base = f"http://{profile.to}:{HTTP_PORT}"
    timeout = httpx.Timeout(profile.timeout_s)
    async with httpx.AsyncClient(
        base_url=base,
        verify=False,  # noqa: S501 -- there is no TLS here
        trust_env=False,
        timeout=timeout,
    ) as http:
        for number in range(profile.requests):
            await client.ask(http, await client.pause_and_begin(number))


class _HttpClient(SimulatedClient):
    async def ask(self, http: httpx.AsyncClient, record: ClientRecord) -> None:
        terminal = "quit"
        try:
            with trio.CancelScope() as scope:
                if self.profile.quit_after_s >= 0:
                    scope.deadline = trio.current_time() + self.profile.quit_after_s
                terminal = await self._exchange(http, record, scope)
        except httpx.HTTPError as error:
            terminal = type(error).__name__
        if terminal:
            self.end(record, terminal)

    async def _exchange(
        self, http: httpx.AsyncClient, record: ClientRecord, scope: trio.CancelScope
    ) -> str:
        """Ask and read; the terminal, or nothing if it has been written down already."""
        messages = [{"role": m.role, "content": m.content} for m in record.request.messages or ()]
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": messages,
            "max_tokens": record.output_tokens,
            "stream": self.profile.stream,
            "n": self.profile.choices,
        }
        if self.profile.min_tokens >= 0:
            body["min_tokens"] = record.request.min_tokens
            body["stop_token_ids"] = record.request.stop_token_ids
        headers = {"x-request-id": record.name}
        async with http.stream(
            "POST", "/v1/chat/completions", json=body, headers=headers
        ) as answer:
            record.status = answer.status_code
            if answer.status_code != 200 or not self.profile.stream:
                return self._whole(record, await answer.aread())
            return await self._events(record, answer, scope)

    def _whole(self, record: ClientRecord, body: bytes) -> str:
        if record.status != 200:
            return f"error {record.status}"
        for choice in json.loads(body)["choices"]:
            self._take_choice(record, choice, choice["message"])
        return COMPLETE

    async def _events(
        self, record: ClientRecord, answer: httpx.Response, scope: trio.CancelScope
    ) -> str:
        events = EventSplitter(1 << 20)
        told = False
        raw = cast("AsyncGenerator[bytes, None]", answer.aiter_raw())
        async with aclosing(raw) as pieces:
            async for piece in pieces:
                seen = len(record.text)
                for event in events.feed(piece):
                    told |= self._take_event(record, event.data)
                if 0 <= self.profile.quit_after <= len(record.text) and not told:
                    # Left by an exception, httpx closes all its generators; by a return, not.
                    scope.cancel()
                if self.profile.is_slow:
                    await self.linger(record, seen)
        if not told:
            # The stream ended, as HTTP goes in good order, without saying how.
            return "cut short"
        return ""

    def _take_event(self, record: ClientRecord, data: bytes) -> bool:
        """Take one event; whether it ends the answer."""
        if data == DONE_DATA:
            self.end(record, COMPLETE)
            return True
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            self.end(record, f"error {event['error'].get('code') or event['error'].get('type')}")
            return True
        for choice in event.get("choices", ()):
            self._take_choice(record, choice, choice.get("delta", {}))
        return False

    def _take_choice(
        self, record: ClientRecord, choice: dict[str, Any], said: dict[str, Any]
    ) -> None:
        index, reason, text = (
            choice["index"],
            choice.get("finish_reason"),
            said.get("content") or "",
        )
        if index in record.ended_choices:
            record.late += 1
        if reason:
            record.ended_choices.append(index)
        if index:
            record.others[index] = record.others.get(index, "") + text
        else:
            self.take(record, text)
            record.finish_reason = reason or record.finish_reason
