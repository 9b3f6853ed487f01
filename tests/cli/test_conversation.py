"""`trinamo chat` against frontends of every kind: the answer, or what went wrong in a sentence."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.places import Place, wait_for
from trinamo.cli.chat.conversation import Conversation
from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    RemoteProtocolError,
    RequestError,
    TrinamoError,
    UnavailableError,
)

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def delta(text: str) -> bytes:
    body = json.dumps({"choices": [{"delta": {"content": text}}]})
    return chunk(f"data: {body}\n\n".encode())


DONE = chunk(b"data: [DONE]\n\n") + chunk(b"")


@contextmanager
def frontend(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that answers each connection with the next of some bytes, whatever is asked."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                peer, _ = listener.accept()
                with peer:
                    asked.append(peer.recv(65_536))
                    peer.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
        thread.join(5)


def test_the_answer_is_written_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    with frontend(HEAD + delta("Hel") + delta("lo") + DONE) as (url, _):
        is_complete = Conversation(url).ask("hi")

    assert is_complete
    assert capsys.readouterr().out == "Hello\n"


def test_a_key_is_sent_and_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    with frontend(HEAD + delta("one") + DONE) as (url, asked):
        Conversation(url, key="sk-secret").ask("first")

    assert b"Authorization: Bearer sk-secret\r\n" in asked[0]
    assert "sk-secret" not in capsys.readouterr().out


def test_a_conversation_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    with frontend(HEAD + delta("one") + DONE, HEAD + delta("two") + DONE) as (url, asked):
        talk = Conversation(f"{url}/v1/", system="Be brief.", max_tokens=5, temperature=0.0)
        talk.ask("first")
        talk.ask("second")

    body = json.loads(asked[1].partition(b"\r\n\r\n")[2])
    assert [turn["content"] for turn in body["messages"]] == [
        "Be brief.",
        "first",
        "one",
        "second",
    ]
    assert (body["max_tokens"], body["temperature"], body["stream"]) == (5, 0.0, True)
    assert "model" not in body
    assert capsys.readouterr().out == "one\ntwo\n"


def answer(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


ERROR = b'{"error": {"message": "no such thing"}}'


@pytest.mark.parametrize(
    ("answered", "kind", "words"),
    [
        (HEAD + delta("half") + chunk(b""), DisconnectedError, "before it was complete"),
        (HEAD + delta("half"), DisconnectedError, "ended"),
        (HEAD + delta("half") + chunk(b"data: " + ERROR + b"\n\n"), UnavailableError, "no such"),
        (HEAD + chunk(b"data: {\n\n"), RemoteProtocolError, "not JSON"),
        (HEAD + chunk(b"data: 1\n\n"), RemoteProtocolError, "no object"),
        (answer("404 Not Found", ERROR), RequestError, "404.*no such thing"),
        (answer("503 Unavailable", ERROR), UnavailableError, "503.*no such thing"),
        (answer("500 Oh", b"<html>"), UnavailableError, "500"),
        (b"SSH-2.0-x\r\n\r\n", RemoteProtocolError, "not an HTTP answer"),
        (b"", DisconnectedError, "ended"),
    ],
)
def test_what_goes_wrong_is_a_typed_error(
    answered: bytes, kind: type[TrinamoError], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with frontend(answered) as (url, _), pytest.raises(kind, match=words):
        Conversation(url).ask("hi")

    assert capsys.readouterr().out in ("", "half\n")


def test_a_frontend_that_is_not_there_is_named() -> None:
    with pytest.raises(ConnectError, match=r"127\.0\.0\.1:9: .*trinamo up"):
        Conversation("http://127.0.0.1:9").ask("hi")


def test_ctrl_c_stops_the_answer(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        process = place.start("chat", "hi", "--url", url)
        peer, _ = listener.accept()
        with peer:
            peer.recv(65_536)
            peer.sendall(HEAD + delta("Hel"))
            wait_for(lambda: "Hel" in place.output, 120, "the first words")
            process.send_signal(signal.SIGINT)
            code = process.wait(120)
            assert peer.recv(1) == b"", "the connection is closed, which cancels the request"

    assert (code, place.output) == (130, "Hel\n")


def test_what_failed_is_forgotten() -> None:
    """Or the next question would be answered for it."""
    with frontend(answer("503 No", ERROR), HEAD + delta("yes") + DONE) as (url, asked):
        talk = Conversation(url)
        with pytest.raises(UnavailableError):
            talk.ask("first")
        talk.ask("second")

    body = json.loads(asked[1].partition(b"\r\n\r\n")[2])
    assert [turn["content"] for turn in body["messages"]] == ["second"]
