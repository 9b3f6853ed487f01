"""The log: formats, fields, what is masked, what is held back."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
import trio

from trinamo.runtime.config import LogConfig, Secret
from trinamo.runtime.env import RealClock
from trinamo.runtime.log import LogThrottle, get_logger, log_fields, setup_log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def events(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def json_log(level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    setup_log(LogConfig(level=level, format="json"), stream=stream)  # type: ignore[arg-type]
    return stream


def test_an_event_is_one_json_line_with_its_fields() -> None:
    stream = json_log()

    get_logger("trinamo.x").info("worker is up", instance_id=7, raw=b"a")

    [event] = events(stream)
    assert event.pop("time").endswith("Z")
    assert event == {
        "event": "worker is up",
        "instance_id": 7,
        "raw": "a",
        "level": "info",
        "logger": "trinamo.x",
    }


def test_a_terminal_gets_colour_and_a_file_gets_json() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        setup_log(LogConfig(), stream=stream)
        get_logger("x").info("hello", key=1)

    assert "\x1b[" in terminal.getvalue()
    assert events(file)[0]["key"] == 1


def test_the_console_format_without_a_terminal_has_no_colour() -> None:
    stream = io.StringIO()
    setup_log(LogConfig(format="console"), stream=stream)

    get_logger("x").warning("hello", key=1)

    assert "\x1b[" not in stream.getvalue()
    assert "key=1" in stream.getvalue()


def test_events_below_the_level_are_not_written() -> None:
    stream = json_log("warning")

    get_logger("x").info("no")
    get_logger("x").warning("yes")

    assert [event["event"] for event in events(stream)] == ["yes"]


def test_setting_up_again_does_not_write_twice() -> None:
    json_log()
    stream = json_log()

    get_logger("x").info("once")

    assert len(events(stream)) == 1


def test_the_libraries_log_ends_in_the_same_stream() -> None:
    stream = json_log()

    logging.getLogger("library").warning("lost %d", 3, extra={"password": "hunter2"})
    logging.getLogger("nats").info("quiet")

    [event] = events(stream)
    assert (event["event"], event["logger"], event["password"]) == ("lost 3", "library", "***")


async def test_fields_of_a_scope_are_on_every_event_of_its_tasks() -> None:
    stream = json_log()

    async def task() -> None:
        get_logger("x").info("inside")

    with log_fields(request_id="r1"):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(task)
    get_logger("x").info("outside")

    inside, outside = events(stream)
    assert inside["request_id"] == "r1"
    assert "request_id" not in outside


def test_secrets_are_masked_wherever_they_are() -> None:
    stream = json_log()

    get_logger("x").info(
        "login",
        password="hunter2",
        token="hunter2",
        api_key="hunter2",
        headers={"Authorization": "hunter2", "nested": [{"auth-token": "hunter2"}]},
        wrapped=Secret("hunter2"),
        url="nats://user:hunter2@host:4222",
    )

    assert "hunter2" not in stream.getvalue()
    assert events(stream)[0]["url"] == "nats://***@host:4222"


def test_a_traceback_in_json_hides_locals_and_url_passwords() -> None:
    stream = json_log()

    def connect(password: str) -> None:
        raise ValueError(f"nats://u:{password}@host")

    try:
        connect("hunter" + "2")
    except ValueError:
        get_logger("x").exception("failed")

    [event] = events(stream)
    assert "ValueError: nats://***@host" in event["exception"]
    assert "hunter2" not in event["exception"]


def test_words_about_text_tokens_stay_readable() -> None:
    stream = json_log()

    get_logger("x").info("step", tokens=3, token_ids=[1, 2], max_tokens=5, last_token=2)

    event = events(stream)[0]
    assert [event[name] for name in ("tokens", "token_ids", "max_tokens", "last_token")] == [
        3,
        [1, 2],
        5,
        2,
    ]


async def test_a_throttled_event_comes_once_per_interval_with_its_count(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stream = json_log()
    throttle = LogThrottle(get_logger("x"), RealClock(), interval_s=5)

    passed = []
    for _ in range(12):
        passed.append(throttle.warning("bad frame", peer="p"))
        await trio.sleep(1)

    assert passed.count(True) == 3
    assert [event.get("suppressed") for event in events(stream)] == [None, 4, 4]


async def test_throttled_keys_do_not_hold_each_other_back_and_are_bounded() -> None:
    stream = json_log()
    throttle = LogThrottle(get_logger("x"), RealClock(), keys_max=2)

    assert throttle.info("e", key="a")
    assert throttle.error("e", key="b")
    assert not throttle.info("e", key="a")
    assert throttle.info("e", key="c")
    assert throttle.info("e", key="a")  # forgotten to make room

    assert len(events(stream)) == 4
