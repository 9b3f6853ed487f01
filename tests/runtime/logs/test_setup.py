"""The log: formats, fields, what is masked, what is escaped, what is held back."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from trinamo.runtime.config.config import LogConfig
from trinamo.runtime.config.keys import Secret
from trinamo.runtime.env import RealEnv
from trinamo.runtime.logs.access import AccessLog
from trinamo.runtime.logs.fields import log_fields, name_process
from trinamo.runtime.logs.setup import setup_log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("trinamo")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    logging.captureWarnings(capture=False)


def events(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def json_log(level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    setup_log(LogConfig(level=level, format="json"), stream=stream)  # type: ignore[arg-type]
    return stream


def test_an_event_is_one_json_line_with_its_fields() -> None:
    stream = json_log()

    logging.getLogger("trinamo.x").info(
        "worker %s is up", "w", extra={"instance_id": 7, "raw": b"a"}
    )

    [event] = events(stream)
    assert event.pop("time").endswith("Z")
    assert event == {
        "event": "worker w is up",
        "instance_id": 7,
        "raw": "a",
        "level": "info",
        "logger": "trinamo.x",
    }


def test_a_terminal_gets_colour_and_a_file_gets_json() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        setup_log(LogConfig(), stream=stream)
        logging.getLogger("trinamo.x").info("hello", extra={"key": 1})

    assert "\x1b[" in terminal.getvalue()
    assert events(file)[0]["key"] == 1


def test_the_console_format_without_a_terminal_has_no_colour() -> None:
    stream = io.StringIO()
    setup_log(LogConfig(format="console"), stream=stream)

    logging.getLogger("trinamo.x").warning("hello", extra={"key": 1})

    assert "\x1b[" not in stream.getvalue()
    assert "key=1" in stream.getvalue()


def test_events_below_the_level_are_not_written() -> None:
    stream = json_log("warning")

    logging.getLogger("trinamo.x").info("no")
    logging.getLogger("trinamo.x").warning("yes")

    assert [event["event"] for event in events(stream)] == ["yes"]


def test_setting_up_again_does_not_write_twice() -> None:
    json_log()
    stream = json_log()

    logging.getLogger("trinamo.x").info("once")

    assert len(events(stream)) == 1


def test_of_libraries_warnings_are_written_whatever_our_own_level_is() -> None:
    """`hpack` told each header's value at `debug`; the next library that does has no name yet."""
    stream = json_log("debug")

    logging.getLogger("library").warning("lost %d", 3, extra={"password": "hunter2"})
    logging.getLogger("library").info("Decoded (b'authorization', b'Bearer sk-1')")

    [event] = events(stream)
    assert (event["event"], event["logger"], event["password"]) == ("lost 3", "library", "***")


async def test_fields_of_a_scope_are_on_every_event_of_its_tasks() -> None:
    stream = json_log()

    async def task() -> None:
        logging.getLogger("trinamo.x").info("inside")

    with log_fields(request_id="r1"):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(task)
    logging.getLogger("trinamo.x").info("outside")

    inside, outside = events(stream)
    assert inside["request_id"] == "r1"
    assert "request_id" not in outside


def test_secrets_are_masked_wherever_they_are() -> None:
    stream = json_log()

    logging.getLogger("trinamo.x").info(
        "login at %s",
        "nats://user:hunter2@host:4222",
        extra={
            "password": "hunter2",
            "token": "hunter2",
            "api_key": "hunter2",
            "headers": {"Authorization": "hunter2", "nested": [{"auth-token": "hunter2"}]},
            "wrapped": Secret("hunter2"),
            "url": "nats://user:hunter2@host:4222",
        },
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
        logging.getLogger("trinamo.x").exception("failed")

    [event] = events(stream)
    assert "ValueError: nats://***@host" in event["exception"]
    assert "hunter2" not in event["exception"]


def test_words_about_text_tokens_stay_readable() -> None:
    stream = json_log()

    logging.getLogger("trinamo.x").info(
        "step", extra={"tokens": 3, "token_ids": [1, 2], "max_tokens": 5, "last_token": 2}
    )

    event = events(stream)[0]
    assert [event[name] for name in ("tokens", "token_ids", "max_tokens", "last_token")] == [
        3,
        [1, 2],
        5,
        2,
    ]


def test_fields_of_the_process_are_on_every_line_and_those_of_a_scope_win(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trinamo.runtime.logs.fields._process", {})
    stream = json_log()

    name_process(instance_id="a1", model="m")
    with log_fields(model="other"):
        logging.getLogger("trinamo.x").info("inside")

    [event] = events(stream)
    assert (event["instance_id"], event["model"]) == ("a1", "other")


NASTY = "a\nb\x1b]0;title\x07\x9b31m\u202e\u2028\ud800"


@pytest.mark.parametrize("form", ["console", "json"])
def test_what_a_peer_wrote_stays_in_its_line_and_commands_no_terminal(form: Any) -> None:
    stream = io.StringIO()
    setup_log(LogConfig(format=form), stream=stream)

    logging.getLogger("trinamo.x").warning("refused: %s", NASTY, extra={"request_id": NASTY})

    [line] = stream.getvalue().splitlines()
    assert [c for c in line if not c.isprintable()] == []
    assert line.count("b\\u001b]0;title\\u0007") == 2
    assert form == "console" or json.loads(line)["request_id"] == NASTY
    line.encode()  # A lone surrogate would stop the writer.


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_line_is_bounded_whatever_comes_in(form: Any) -> None:
    stream = io.StringIO()
    setup_log(LogConfig(format=form), stream=stream)

    huge = "k" * 200_000
    logging.getLogger("trinamo.x").warning(
        "refused: %s", huge, extra={"id": huge, "ids": [huge] * 9000}
    )

    [line] = stream.getvalue().splitlines()
    assert len(line) < 100_000
    assert "more characters" in line


@pytest.mark.parametrize("form", ["console", "json"])
def test_the_cause_at_the_bottom_of_many_groups_is_told(form: Any) -> None:
    """Python's own traceback stops at ten groups, a runtime has more nurseries than that."""
    stream = io.StringIO()
    setup_log(LogConfig(format=form), stream=stream)
    error: Exception = MemoryError("of 4 GB")
    for _ in range(30):
        inner: list[Exception] = [error]
        error = ExceptionGroup("unhandled errors in a TaskGroup", inner)

    logging.getLogger("trinamo.x").error("the process ends", exc_info=error)

    assert "MemoryError: of 4 GB" in stream.getvalue().splitlines()[0]


def test_what_an_error_was_raised_from_is_told() -> None:
    stream = io.StringIO()
    setup_log(LogConfig(format="console"), stream=stream)
    root = MemoryError("of 4 GB")
    root.__cause__ = OSError("no room")
    error = RuntimeError("internal error")
    error.__cause__ = ExceptionGroup("tasks", [root])

    logging.getLogger("trinamo.x").error("the process ends", exc_info=error)

    [line, *_] = stream.getvalue().splitlines()
    told = "RuntimeError: internal error, from MemoryError: of 4 GB, from OSError: no room"
    assert f"error={told}" in line


def test_a_call_with_wrong_arguments_is_a_line_and_no_traceback() -> None:
    stream = io.StringIO()
    handler = setup_log(LogConfig(), stream=stream)

    handler.handle(logging.LogRecord("x", logging.ERROR, "", 0, "of %d", ("\x1b[2J",), None))

    assert stream.getvalue() == "x: cannot write a line: of %d\n"


async def test_a_stream_that_takes_nothing_is_no_error_of_who_logs() -> None:
    stream = io.StringIO()
    handler = setup_log(LogConfig(), stream=stream)
    stream.close()

    logging.getLogger("trinamo.x").warning("nobody hears it")
    handler.handle(logging.LogRecord("x", logging.ERROR, "", 0, "of %d", ("wrong",), None))
    AccessLog(RealEnv().clock).tell("GET", "/", 200, "success", began_at=0, is_success=True)


def test_no_line_of_a_traceback_passes_for_an_event() -> None:
    stream = io.StringIO()
    setup_log(LogConfig(format="console"), stream=stream)

    error = ValueError("x\n2026-11-22T00:00:00Z [info    ] all is well\x1b[2J")
    logging.getLogger("trinamo.x").error("failed", exc_info=error)

    first, *rest = stream.getvalue().splitlines()
    assert "[error   ] failed" in first
    assert rest
    assert all(line.startswith("    ") for line in rest)
    assert "\x1b" not in stream.getvalue()
