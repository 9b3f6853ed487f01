"""Names are looked up apart: a name server that is silent takes no thread from anybody else."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
import trio

from trinamo.cli.serve.resources import LOOKUPS_MAX, NameLookups


async def test_names_that_nobody_tells_leave_threads_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those who asked have long left; a lookup cannot be stopped. Trio has 40 threads."""
    is_over, asked = threading.Event(), threading.Semaphore(0)

    def hang(*asked_for: Any) -> Any:
        if asked_for[-1] & socket.AI_NUMERICHOST:
            # Trio tries first whether it is a number.
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        asked.release()
        assert is_over.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    trio.socket.set_custom_hostname_resolver(NameLookups())
    try:
        async with trio.open_nursery() as nursery:
            for _ in range(60):
                nursery.start_soon(trio.open_tcp_stream, "name.example", 80)
            for _ in range(LOOKUPS_MAX):
                await trio.to_thread.run_sync(asked.acquire)
            nursery.cancel_scope.cancel()
        with trio.fail_after(120):
            assert await trio.to_thread.run_sync(lambda: 1, abandon_on_cancel=True) == 1
    finally:
        is_over.set()
    with pytest.raises(OSError, match="Temporary failure"):
        await trio.open_tcp_stream("name.example", 80)


async def test_names_are_told_as_ever() -> None:
    trio.socket.set_custom_hostname_resolver(NameLookups())
    found = await trio.socket.getaddrinfo("localhost", 80, type=socket.SOCK_STREAM)
    assert {each[4][0] for each in found} <= {"127.0.0.1", "::1"}
    assert found
    name, port = await trio.socket.getnameinfo(
        ("127.0.0.1", 80), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    )
    assert (name, port) == ("127.0.0.1", "80")
