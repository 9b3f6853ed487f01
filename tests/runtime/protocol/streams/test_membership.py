from __future__ import annotations

import pytest

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.protocol.streams.membership import (
    NONCE_BYTES,
    Greeting,
    GreetingState,
    Purpose,
)

SECRET = b"correct horse battery staple"


def dialling(
    secret: bytes = SECRET, purpose: Purpose = Purpose.REQUESTS, nonce: int = 1
) -> Greeting:
    return Greeting.dialling(purpose, secret, bytes([nonce]) * NONCE_BYTES)


def listening(
    secret: bytes = SECRET, purpose: Purpose = Purpose.REQUESTS, nonce: int = 2, name: str = "7f"
) -> Greeting:
    return Greeting.listening(purpose, secret, bytes([nonce]) * NONCE_BYTES, name)


def converse(dialler: Greeting, listener: Greeting) -> list[bytes]:
    """All that is said, in turn, each piece as large as the other end asks for."""
    said, words, hears = [], dialler.begin(), listener
    while words:
        said.append(words)
        answer = b""
        while words:
            piece, words = words[: hears.wanted_bytes], words[hears.wanted_bytes :]
            answer += hears.receive(piece)
        hears, words = (dialler if hears is listener else listener), answer
    return said


@pytest.mark.parametrize("secret", [SECRET, b""])
def test_two_members_prove_it_to_each_other_and_the_listener_says_who_it_is(secret: bytes) -> None:
    dialler, listener = dialling(secret), listening(secret, name="instance-é")
    said = converse(dialler, listener)
    assert dialler.is_over
    assert listener.is_over
    assert dialler.peer_name == "instance-é"
    assert len(said) == 4
    assert sum(map(len, said)) < 1024
    assert dialler.wanted_bytes == listener.wanted_bytes == 0
    assert SECRET not in b"".join(said)


def test_a_listener_may_have_no_name() -> None:
    dialler, listener = dialling(), listening(name="")
    converse(dialler, listener)
    assert dialler.is_over
    assert dialler.peer_name == ""


@pytest.mark.parametrize(
    "listener",
    [
        listening(b"another secret, as long"),
        listening(b""),
        listening(SECRET + b"\0"),
        listening(purpose=Purpose.TRANSFERS),
    ],
)
def test_another_secret_or_purpose_is_refused_before_the_listener_says_who_it_is(
    listener: Greeting,
) -> None:
    dialler = dialling()
    challenge = listener.receive(dialler.begin())
    with pytest.raises(RemoteProtocolError, match="secret_file differs"):
        listener.receive(dialler.receive(challenge))
    assert listener.state is GreetingState.REFUSED


def test_a_listener_that_does_not_know_the_secret_is_found_out() -> None:
    dialler, honest = dialling(), listening()
    proof = dialler.receive(honest.receive(dialler.begin()))
    welcome = honest.receive(proof)
    # An impostor at the address: it has heard the dialler's proof, and makes a welcome of it.
    dialler, impostor = dialling(), listening(b"")
    challenge = impostor.receive(dialler.begin())
    heard = dialler.receive(challenge)
    for forged in (heard + b"\x027f", welcome[:-1] + b"e", bytes(32) + b"\x027f"):
        victim = dialling()
        victim.begin()
        victim.receive(challenge)
        victim.receive(forged[:33])
        with pytest.raises(RemoteProtocolError, match="secret_file differs"):
            victim.receive(forged[33:])
        assert not victim.is_over


def test_what_was_said_on_one_connection_is_of_no_use_on_another() -> None:
    hello, _, proof, _ = converse(dialling(), listening())
    listener = listening(nonce=3)
    listener.receive(hello)
    with pytest.raises(RemoteProtocolError, match="proof is wrong"):
        listener.receive(proof)
    _, challenge, _, welcome = converse(dialling(), listening())
    dialler = dialling(nonce=4)
    dialler.begin()
    dialler.receive(challenge)
    dialler.receive(welcome[:33])
    with pytest.raises(RemoteProtocolError, match="proof is wrong"):
        dialler.receive(welcome[33:])


def test_a_name_that_was_changed_on_the_way_is_refused() -> None:
    dialler, listener = dialling(), listening(name="7f")
    welcome = listener.receive(dialler.receive(listener.receive(dialler.begin())))
    dialler.receive(welcome[:33])
    with pytest.raises(RemoteProtocolError, match="proof is wrong"):
        dialler.receive(b"7e")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda hello: b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n"[: len(hello)], "another protocol"),
        (lambda hello: hello.replace(b"\n\x02", b"\n\x01", 1), "another version"),
        (lambda hello: hello.replace(b"\n\x02\0\0", b"\n\x02\0\1", 1), "another version"),
    ],
)
def test_another_protocol_version_or_flag_is_refused_without_a_word(change, why: str) -> None:  # type: ignore[no-untyped-def]
    listener = listening()
    with pytest.raises(RemoteProtocolError, match=why):
        listener.receive(change(dialling().begin()))


def test_an_answer_of_another_protocol_is_refused() -> None:
    dialler = dialling()
    dialler.begin()
    with pytest.raises(RemoteProtocolError, match="another protocol"):
        dialler.receive(b"HTTP/1.1 400 Bad Request"[: dialler.wanted_bytes])


def test_more_bytes_than_are_due_are_refused() -> None:
    listener = listening()
    with pytest.raises(RemoteProtocolError, match="more bytes"):
        listener.receive(bytes(listener.wanted_bytes + 1))


def test_the_hello_ends_as_the_head_of_an_http_request_does() -> None:
    """So that a server of HTTP at the address answers at once, and is not waited for."""
    assert b"\r\n\r\n" in dialling().begin()
