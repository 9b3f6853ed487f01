"""A conversation over HTTP: each answer is streamed to standard output as it comes.

The terminal's input is read outside trio and every answer is a `trio.run` of its own, so that
Ctrl-C means one thing at a time: it stops the answer, or at the prompt it ends the conversation.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

import trio

from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    RemoteProtocolError,
    RequestError,
    TrinamoError,
    UnavailableError,
)
from trinamo.runtime.logs.text import one_line
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.protocol.openai.answers import DONE_DATA
from trinamo.transports.openai.client import HttpReply, open_request
from trinamo.transports.openai.events import EventSplitter

from ..options import place_of

TURNS_MAX: Final = 200
_EVENT_BYTES_MAX: Final = 1 << 20
"""Older turns are forgotten; the system prompt stays."""


class Conversation:
    """What was said so far, and how to ask on. `url` is the frontend's, with or without `/v1`."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        system: str | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        key: str = "",
    ) -> None:
        self._base = place_of(url)
        given = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        self._settings = {name: value for name, value in given.items() if value is not None}
        self._system = [{"role": "system", "content": system}] if system else []
        self._headers: dict[str, str] = {}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._turns: list[dict[str, str]] = []

    def ask(self, prompt: str) -> bool:
        """Ask and write the answer to standard output; False if Ctrl-C stopped it.

        Raises what the frontend or the network said; then, and if it was stopped, what was asked
        is forgotten, so that the next question is not answered for it.
        """
        turns = [*self._turns, {"role": "user", "content": prompt}]
        pieces: list[str] = []
        try:
            is_complete = trio.run(self._answer, turns, pieces)
        finally:
            if pieces and not pieces[-1].endswith("\n"):
                _write("\n")
        if is_complete:
            turns.append({"role": "assistant", "content": "".join(pieces)})
            self._turns = turns[-TURNS_MAX:]
        return is_complete

    async def _answer(self, turns: list[dict[str, str]], pieces: list[str]) -> bool:
        """Fill `pieces` until the answer's end; whether it came before SIGINT."""
        is_complete = False
        problem: TrinamoError | None = None
        with trio.open_signal_receiver(signal.SIGINT) as signals:
            async with open_nursery() as nursery:

                async def stop_at_signal() -> None:
                    async for _ in signals:
                        nursery.cancel_scope.cancel()

                nursery.start_soon(stop_at_signal)
                try:
                    async with aclosing(self._pieces(turns)) as stream:
                        async for piece in stream:
                            pieces.append(piece)
                            _write(_harmless(piece))
                    is_complete = True
                except TrinamoError as error:
                    problem = error  # Raised below, outside the nursery's group.
                nursery.cancel_scope.cancel()
        if problem is not None:
            raise problem
        return is_complete

    async def _pieces(self, turns: list[dict[str, str]]) -> AsyncGenerator[str, None]:
        request = {**self._settings, "messages": [*self._system, *turns], "stream": True}
        url = f"{self._base}/v1/chat/completions"
        try:
            async with open_request(
                url,
                body=json.dumps(request).encode(),
                headers=self._headers,
            ) as response:
                if response.status != 200:
                    raise await _refusal(response)
                async with aclosing(_events(response)) as events:
                    async for event in events:
                        delta = (event.get("choices") or [{}])[0].get("delta") or {}
                        yield str(delta.get("content") or "")
        except ConnectError as error:
            raise ConnectError(
                f"{error.message}. Is the cluster running? Start it with `trinamo up`, or name"
                " its frontend with --url"
            ) from error


async def _events(response: HttpReply) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a stream; raises if it ends without its end mark, or with an error."""
    events = EventSplitter(_EVENT_BYTES_MAX)
    async with aclosing(response.chunks()) as chunks:
        async for data in chunks:
            for event in events.feed(data):
                if event.data == DONE_DATA:
                    return
                chunk = _parse(event.data)
                if "error" in chunk:
                    raise UnavailableError(f"the answer broke off: {_message_of(chunk)}")
                yield chunk
    raise DisconnectedError("the answer ended before it was complete")


async def _refusal(response: HttpReply) -> TrinamoError:
    body = await response.body()
    kind = RequestError if 400 <= response.status < 500 else UnavailableError
    try:
        words = _message_of(_parse(body))
    except RemoteProtocolError:
        words = "no reason given"
    return kind(f"the frontend said no ({response.status}): {words}")


def _parse(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RemoteProtocolError("the frontend sent something that is not JSON") from error
    if not isinstance(value, dict):
        raise RemoteProtocolError("the frontend sent JSON that is no object")
    return value


def _message_of(body: dict[str, Any]) -> str:
    error = body.get("error")
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _harmless(text: str) -> str:
    """What a model says, for a terminal: it must not command it. A pipe gets it as it is."""
    if not sys.stdout.isatty():
        return text
    return "\n".join(
        "\t".join(one_line(part, characters_max=len(part)) for part in line.split("\t"))
        for line in text.split("\n")
    )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def converse(conversation: Conversation) -> None:
    """Ask for prompts until the input ends; errors are told, and the conversation goes on."""
    import readline  # noqa: F401 -- gives `input` its line editing

    _write("Say something; Ctrl-C stops an answer, Ctrl-D ends.\n")
    while True:
        try:
            prompt = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            _write("\n")
            return
        if not prompt:
            continue
        try:
            conversation.ask(prompt)
        except TrinamoError as error:
            sys.stderr.write(f"trinamo: {one_line(error.message)}\n")
