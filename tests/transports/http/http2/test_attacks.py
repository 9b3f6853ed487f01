"""Clients that use HTTP/2 to cause work or hold memory: each is ended, and nobody else notices."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import h2.exceptions
import h2.settings
import pytest
import trio
import trio.lowlevel

from tests.runtime.http.running import with_tls
from tests.transports.http.http2.client import (
    CONTINUATION,
    DATA,
    FLOW_CONTROL_MAX,
    HEADERS,
    PING,
    PRIORITY,
    RESET,
    SETTINGS,
    WINDOW,
    Http2Client,
    closing,
    connect,
    frame,
)
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.protocol.openai.generate import Delta, GenerateRequest
from trinamo.transports.http.http2 import connection

pytestmark = [pytest.mark.check, with_tls]

ENHANCE_YOUR_CALM = 11
Attack = Callable[[Http2Client], Awaitable[None]]


async def rapid_reset(client: Http2Client) -> None:
    for _ in range(1_000):
        stream_id = await client.chat()
        client.h2.reset_stream(stream_id, 8)
        await client.flush()


async def resets_that_we_are_made_to_send(client: Http2Client) -> None:
    """A zero grant of window is an error of the stream, whose request goes on if one forgets it."""
    for _ in range(1_000):
        stream_id = await client.chat()
        await client.send(frame(WINDOW, stream_id, bytes(4)))


async def pings(client: Http2Client) -> None:
    await client.send(frame(PING, 0, bytes(8)) * 10_000)


async def settings(client: Http2Client) -> None:
    await client.send(frame(SETTINGS, 0) * 10_000)


async def priorities(client: Http2Client) -> None:
    await client.send(frame(PRIORITY, 1, b"\x00\x00\x00\x00\x10") * 10_000)


async def windows(client: Http2Client) -> None:
    await client.send(frame(WINDOW, 0, b"\x00\x00\x00\x01") * 10_000)


async def unknown_frames(client: Http2Client) -> None:
    await client.send(frame(0xFA, 0, b"?") * 10_000)


async def empty_data(client: Http2Client) -> None:
    stream_id = await client.ask("/v1/completions", method="POST", is_whole=False)
    await client.send(frame(DATA, stream_id) * 10_000)


async def continuations(client: Http2Client) -> None:
    await client.send(frame(HEADERS, 1, b"\x82") + frame(CONTINUATION, 1, b"") * 10_000)


async def full_continuations(client: Http2Client) -> None:
    piece = b"\x00\x01a\x7f\x81\x7e" + b"x" * 16_000
    await client.send(frame(HEADERS, 1, b"\x82") + frame(CONTINUATION, 1, piece[:16_384]) * 200)


async def a_header_bomb(client: Http2Client) -> None:
    """A big entry in HPACK's table, named again and again: small on the wire, huge when read."""
    entry = b"\x40\x01a\x7f\x81\x1f" + b"x" * 4_000
    await client.send(frame(HEADERS, 1, b"\x82\x84\x87" + entry + b"\xbe" * 12_000, flags=4))


async def too_many_streams(client: Http2Client) -> None:
    head = b"\x83\x84\x87\x01\x09localhost"
    await client.send(b"".join(frame(HEADERS, each, head, flags=4) for each in range(1, 401, 2)))


async def a_head_of_many_fields(client: Http2Client) -> None:
    """Each field is a byte here, and microseconds there, before anybody looks for a key."""
    entry = b"\x40\x01a\x01b"
    head = b"\x82\x84\x87\x01\x09localhost" + entry
    await client.send(frame(HEADERS, 1, head + b"\xbe" * 750, flags=5))


async def heads_of_as_many_fields_as_there_may_be(client: Http2Client) -> None:
    for _ in range(500):
        await client.ask("/nowhere", headers=(("a", "b"),) * 99)


async def many_fields_behind_a_body(client: Http2Client) -> None:
    stream_id = await client.ask("/v1/completions", method="POST", is_whole=False)
    await client.send(frame(HEADERS, stream_id, b"\x40\x01a\x01b" + b"\xbe" * 750, flags=5))


async def resets_of_streams_that_are_none(client: Http2Client) -> None:
    await client.send(b"".join(frame(RESET, each, bytes(4)) for each in range(1, 20_001, 2)))


ATTACKS: list[Attack] = [
    rapid_reset,
    resets_that_we_are_made_to_send,
    pings,
    settings,
    priorities,
    windows,
    unknown_frames,
    empty_data,
    continuations,
    full_continuations,
    a_header_bomb,
    too_many_streams,
    resets_of_streams_that_are_none,
    a_head_of_many_fields,
    heads_of_as_many_fields_as_there_may_be,
    many_fields_behind_a_body,
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
async def test_it_ends_the_connection_and_leaves_nothing(serve: Any, attack: Attack) -> None:
    running = await serve()
    with closing(await connect(running)) as client:
        await client.start()
        async with trio.open_nursery() as nursery:
            # As it attacks it reads too, or the server's words would wait for it.
            nursery.start_soon(client.until, lambda: False)
            with contextlib.suppress(h2.exceptions.ProtocolError):
                # That is what this side's library says after the server's last word.
                await attack(client)
            nursery.start_soon(running.wait_for, lambda: client.is_over)
        assert client.goaway not in (None, 0)
        assert len(running.engine.contexts) < 500
    async with running.client() as other:
        assert (await other.get("/live")).status_code == 200
    await running.wait_quiet()


async def test_resets_at_the_pace_of_people_are_no_attack(serve: Any) -> None:
    """Whoever leaves every second answer early, and takes the others, is let."""

    running = await serve()
    with closing(await connect(running)) as client:
        await client.start()
        for _ in range(200):
            # The budget refills with time; without a pause a fast machine asks faster than people.
            await trio.sleep(0.02)
            left, taken = await client.chat(), await client.chat()
            client.h2.reset_stream(left, 8)
            await client.flush()
            assert (await client.answer(taken)).status == 200
        assert client.goaway is None
    await running.wait_quiet()


async def for_ever(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
    while True:
        yield Delta("x" * 10_000, [1])
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("window", [0, 1_000])
async def test_a_stream_that_grants_no_window_waits_in_bounds_and_is_cut_off(
    serve: Any, window: int
) -> None:
    running = await serve(for_ever, write_timeout_s=0.3)
    with closing(await connect(running)) as client:
        client.grants = False
        await client.start({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        stuck = await client.chat()
        live = await client.answer(await client.ask("/live", method="HEAD"))
        assert live.status == 200
        answer = await client.answer(stuck)
        assert answer.reset == 8
        assert len(answer.body) == window
    await running.wait_quiet()
    assert running.engine.contexts[0].kill_reason is Reason.CLIENT_DISCONNECT
    labels = {"model": "local", "endpoint": "chat"}
    assert running.value("requests_total", outcome="client_disconnect", **labels) == 1


async def test_a_client_that_reads_nothing_at_all_is_cut_off(serve: Any) -> None:
    running = await serve(for_ever, write_timeout_s=0.2)
    with closing(await connect(running)) as client:
        await client.start({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: (1 << 31) - 1})
        client.h2.increment_flow_control_window(1 << 30)
        for _ in range(5):
            await client.chat()
        await running.wait_quiet()


async def test_a_stream_that_takes_nothing_does_not_hold_up_the_others(serve: Any) -> None:
    running = await serve(for_ever)
    with closing(await connect(running)) as client:
        client.grants = False
        await client.start({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 5_000})
        stuck = await client.chat()
        await client.until(lambda: len(client.answers[stuck].body) == 5_000)
        client.grants = True
        going = await client.chat()
        await client.until(lambda: len(client.answers[going].body) > 100_000)
        assert len(client.answers[stuck].body) == 5_000
    await running.wait_quiet()


async def test_bodies_that_do_not_come_are_refused_like_any(serve: Any) -> None:
    running = await serve(body_timeout_s=0.05)
    with closing(await connect(running)) as client:
        await client.start()
        asked = await client.ask(
            "/v1/completions",
            json.dumps({"prompt": "hi"}).encode(),
            is_whole=False,
            headers=(("content-type", "application/json"),),
        )
        answer = await client.answer(asked)
        assert answer.status == 408
    await running.wait_quiet()


@pytest.mark.parametrize(
    "fields",
    [
        (("transfer-encoding", "chunked"),),
        (("connection", "close"),),
        (("Upper", "case"),),
        (("x", "a\r\nhost: evil"),),
        (("x", "a\x00b"),),
        (("a b", "c"),),
        ((":status", "200"),),
        (("content-length", "7"),),
        (("content-length", "5"), ("content-length", "6")),
        (("host", "evil.example"),),
    ],
    ids=str,
)
async def test_a_head_that_http1_would_read_otherwise_is_refused(
    serve: Any, fields: tuple[tuple[str, str], ...]
) -> None:
    running = await serve()
    with closing(await connect(running)) as client:
        await client.start()
        await client.ask("/v1/completions", b"{}", headers=fields)
        await client.until(lambda: client.goaway is not None)
        assert running.engine.requests == []
        assert not any(answer.status == 200 for answer in client.answers.values())
    await running.wait_quiet()


async def test_a_crowd_that_takes_nothing_is_bounded_together(serve: Any) -> None:
    """Before: what one connection may leave was bounded, times 2,048 connections."""
    running = await serve(backlogs_bytes_max=1 << 20)
    budget = running.service.server._driver._backlogs
    window = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0}
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(closing(await connect(running))) for _ in range(4)]
        for client in crowd:
            await client.start(window)
            for _ in range(25):
                await client.ask("/v1/models")
        async with running.client(http2=True) as other:
            assert (await other.get("/v1/models")).status_code == 200
        first = crowd[0].answers
        await crowd[0].until(lambda: any(answer.reset == 8 for answer in first.values()))
        assert first[1].reset == 8
        assert 0 < budget.amount <= budget.amount_max
        last = crowd[-1].answers
        await crowd[-1].until(lambda: all(answer.status for each, answer in last.items() if each))
        assert not any(answer.reset for answer in last.values())
    await running.wait_quiet()
    assert budget.amount == 0


async def test_what_is_unread_when_a_connection_ends_is_counted_no_more(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: it was held until the bound of all backlogs was reached, which such clients could fill."""
    monkeypatch.setattr(connection, "LINGER_S", 0.05)
    monkeypatch.setattr(connection, "GONE_GRACE_S", 0.05)
    running = await serve(for_ever)
    budget = running.service.server._driver._backlogs
    with closing(await connect(running)) as client:
        await client.start({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: FLOW_CONTROL_MAX})
        client.h2.increment_flow_control_window(1 << 30)
        await client.flush()
        await client.chat()
        await running.wait_for(lambda: budget.amount > 1 << 16)
        await client.send(frame(PING, 0, b"seven b"))
        await running.wait_quiet()
        assert budget.amount == 0


@pytest.mark.parametrize(
    ("value", "reason"),
    [(" sk-secret", b"whitespace"), ("sk-secret\x00", b"Illegal character")],
    ids=["blank", "nul"],
)
async def test_who_is_sent_away_is_told_why_and_so_is_the_log_but_no_key(
    serve: Any, caplog: pytest.LogCaptureFixture, value: str, reason: bytes
) -> None:
    """Prometheus 2.42 sends a blank before a key without a type: nobody could find out."""
    running = await serve()
    with closing(await connect(running)) as client:
        await client.start()
        await client.ask("/sd", headers=(("authorization", value),))
        await client.until(lambda: client.goaway is not None)
    assert client.goaway == 1
    assert reason in client.goaway_reason
    await running.wait_quiet()
    [line] = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert reason.decode() in line
    assert "sk-secret" not in line + client.goaway_reason.decode() + caplog.text
