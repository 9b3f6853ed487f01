"""Values that are larger than members write: they cost smaller pages, and keep out nobody."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import trio

from tests.conformance.control.etcd_members import PATIENT
from tests.servers import SessionEtcd
from trinamo.runtime.planes import Put, Resync
from trinamo.transports.etcd import bridge, control, open_etcd
from trinamo.transports.etcd.client import EtcdClient

SMALL_BYTES = 1 << 16


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """One that no other test uses."""
    return f"large/{os.getpid()}/{request.node.name}/"


@pytest.fixture
def small_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    option = "grpc.max_receive_message_length"
    kept = [each for each in bridge._OPTIONS if each[0] != option]
    monkeypatch.setattr(bridge, "_OPTIONS", (*kept, (option, SMALL_BYTES)))
    monkeypatch.setattr(control, "REPLY_BYTES_MAX", SMALL_BYTES)


@pytest.mark.usefixtures("small_replies")
async def test_a_page_that_does_not_fit_is_asked_for_in_parts(
    etcd_server: SessionEtcd, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Attack row 9: a frontend that starts finds its members beside whatever somebody wrote."""
    async with open_etcd(etcd_server.endpoint, PATIENT) as plane:
        for number in range(9):
            await plane.put(f"{prefix}{number}", bytes([number]) * 20_000)
        await plane.put(f"{prefix}4-large", bytes(2 * SMALL_BYTES))
        with caplog.at_level(logging.WARNING, "trinamo.etcd"), trio.fail_after(120):
            found = (await plane.range(prefix)).entries
        await plane.delete_prefix(prefix)
    assert [(each.key, each.value) for each in found] == [
        (f"{prefix}{number}", bytes([number]) * 20_000) for number in range(9)
    ]
    (told,) = [each for each in caplog.messages if "is longer than" in each]
    assert f"'{prefix}4-large': its value is longer than {SMALL_BYTES} bytes" in told


@pytest.mark.usefixtures("small_replies")
async def test_what_comes_after_a_value_that_is_too_large_is_read_in_whole_pages(
    etcd_server: SessionEtcd, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one value of somebody's makes a call of each key of a fleet, at every listing."""
    calls = 0

    async def count(client: EtcdClient, name: str, request: Any) -> Any:
        nonlocal calls
        calls += 1
        return await read(client, name, request)

    read = EtcdClient.read
    monkeypatch.setattr(EtcdClient, "read", count)
    async with open_etcd(etcd_server.endpoint, PATIENT) as plane:
        await plane.put(f"{prefix}-large", bytes(2 * SMALL_BYTES))
        for number in range(200):
            await plane.put(f"{prefix}{number:03}", b"1")
        with trio.fail_after(120):
            found = (await plane.range(prefix)).entries
        await plane.delete_prefix(prefix)
    assert len(found) == 200
    # Down to one key, past the large one, and two pages.
    assert calls == 11


@pytest.mark.usefixtures("small_replies")
async def test_a_watch_goes_on_behind_a_change_that_is_too_large(
    etcd_server: SessionEtcd, prefix: str
) -> None:
    """Each new stream would be lost to it again, with all its watches."""
    async with open_etcd(etcd_server.endpoint, PATIENT) as plane, plane.watch(prefix) as events:
        with trio.fail_after(120):
            await anext(events)
            await plane.put(f"{prefix}a", b"1")
            assert isinstance(await anext(events), Put)
            await plane.put(f"{prefix}b", bytes(2 * SMALL_BYTES))
            resync = await anext(events)
            assert isinstance(resync, Resync)
            assert [each.key for each in resync.entries] == [f"{prefix}a"]
            await plane.put(f"{prefix}c", b"1")
            while not (isinstance(event := await anext(events), Put)):
                pass
            assert event.entry.key == f"{prefix}c"
        await plane.delete_prefix(prefix)
