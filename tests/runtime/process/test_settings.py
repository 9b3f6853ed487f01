"""Settings in the control plane: typed, bounded, followed, and kept through nonsense and outages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from trinamo.runtime.config.config import Config
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import ControlPlaneError, RequestError
from trinamo.runtime.metrics.metrics import Metrics
from trinamo.runtime.planes import ControlPlane, WatchEvent
from trinamo.runtime.process.settings import (
    REQUESTS_MAX,
    LiveConfig,
    Settings,
    find_setting,
    read_settings,
    reset_setting,
    write_setting,
)
from trinamo.transports.memory.control import MemoryControlPlane
from trinamo.transports.memory.store import MemoryStore

NAME = REQUESTS_MAX.name
DEFAULT = REQUESTS_MAX.default


@pytest.fixture
def control() -> ControlPlane:
    return MemoryControlPlane(MemoryStore())


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(RealEnv())


@pytest.fixture
async def settings(control: ControlPlane, metrics: Metrics) -> AsyncIterator[Settings]:
    settings = Settings(control, metrics=metrics)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(settings.run)
        await settings.wait_loaded()
        yield settings
        nursery.cancel_scope.cancel()


async def test_without_a_stored_value_the_default_holds(settings: Settings) -> None:
    assert settings.get(REQUESTS_MAX) == DEFAULT


async def test_a_value_that_is_written_is_in_force_and_wakes_who_waits(
    control: ControlPlane, settings: Settings
) -> None:
    assert await write_setting(control, NAME, "1000") == 1000
    assert await settings.wait_change(REQUESTS_MAX, DEFAULT) == 1000
    await reset_setting(control, NAME)
    assert await settings.wait_change(REQUESTS_MAX, 1000) == DEFAULT


async def test_a_value_stored_before_is_in_force_once_started(
    control: ControlPlane, metrics: Metrics
) -> None:
    await write_setting(control, NAME, "7")
    settings = Settings(control, metrics=metrics)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(settings.run)
        await settings.wait_loaded()
        assert settings.get(REQUESTS_MAX) == 7
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "value", [b"", b"-1", b'"many"', b"1.5", b"\xff", b"[" * 4096, b"9" * 5000]
)
async def test_a_bad_value_is_refused_and_the_one_before_it_kept(
    control: ControlPlane, value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics(RealEnv())
    settings = Settings(control, metrics=metrics)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(settings.run)
        await settings.wait_loaded()
        await write_setting(control, NAME, "40")
        await control.put(REQUESTS_MAX.key, value)
        await trio.testing.wait_all_tasks_blocked()
        assert settings.get(REQUESTS_MAX) == 40
        assert metrics.value("settings_refused_total", setting=NAME) == 1
        assert "40 stays in force" in caplog.text
        nursery.cancel_scope.cancel()


async def test_a_key_of_another_version_is_refused_and_the_watcher_lives_on(
    control: ControlPlane, settings: Settings, metrics: Metrics
) -> None:
    await control.put("config/from.the.future", b"1")
    await write_setting(control, NAME, "3")
    assert await settings.wait_change(REQUESTS_MAX, DEFAULT) == 3
    assert metrics.value("settings_refused_total", setting="unknown") == 1


async def test_a_bad_value_or_name_is_not_written(control: ControlPlane) -> None:
    with pytest.raises(RequestError):
        await write_setting(control, NAME, "-1")
    with pytest.raises(RequestError, match=NAME):
        await write_setting(control, "no.such", "1")
    reading, *_ = await read_settings(control)
    assert (reading.value, reading.is_default, reading.problem) == (DEFAULT, True, "")


async def test_a_reading_tells_what_is_wrong_with_a_stored_value(control: ControlPlane) -> None:
    await control.put(REQUESTS_MAX.key, b'"x"')
    reading, *_ = await read_settings(control)
    assert reading.value == DEFAULT
    assert NAME in reading.problem


class Refusing(MemoryControlPlane):
    """A store that lets nobody read, until it is told to."""

    refuses = True

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        if self.refuses:
            raise ControlPlaneError("etcd: permission denied", definite=True)
        async with super().watch(prefix) as events:
            yield events


async def test_a_process_lives_without_its_settings_and_follows_once_it_may(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    control = Refusing(MemoryStore())
    await write_setting(control, NAME, "5")
    settings = Settings(control, metrics=Metrics(RealEnv()))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(settings.follow)
        await trio.testing.wait_all_tasks_blocked()
        assert settings.get(REQUESTS_MAX) == DEFAULT
        assert "settings are not followed: etcd: permission denied" in caplog.text
        control.refuses = False
        await settings.wait_loaded()
        assert settings.get(REQUESTS_MAX) == 5
        nursery.cancel_scope.cancel()


async def test_what_is_in_force_is_a_metric() -> None:
    metrics, control = Metrics(RealEnv()), MemoryControlPlane(MemoryStore())
    settings = Settings(control, metrics=metrics)
    LiveConfig(Config(), settings, metrics=metrics)
    shown = [metrics.value("setting_value", setting=NAME)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(settings.run)
        await settings.wait_loaded()
        for act in (write_setting(control, NAME, "8"), reset_setting(control, NAME)):
            await act
            await trio.testing.wait_all_tasks_blocked()
            shown.append(metrics.value("setting_value", setting=NAME))
        nursery.cancel_scope.cancel()

    own = Config().worker.requests_max
    assert shown == [own, 8, own]
    edge = "http.requests_max"
    assert metrics.value("setting_value", setting=edge) == Config().http.requests_max


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("worker.requests_max", "many", "Expected `int`, got `str`"),
        ("worker.requests_max", "-1", "Expected `int` >= 0"),
        ("log.level", "loud", "it takes debug, info, warning, error"),
    ],
)
def test_a_person_is_told_what_a_setting_takes(name: str, text: str, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        find_setting(name).read(text)
