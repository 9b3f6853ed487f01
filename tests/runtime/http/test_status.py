"""The table of HTTP codes, row by row, and over the wire."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import trio

from trinamo.runtime import errors
from trinamo.runtime.context import Context, Reason
from trinamo.runtime.errors import KilledError, TrinamoError
from trinamo.runtime.http.models.models import ModelAwayError
from trinamo.runtime.http.status import (
    BodyTimeoutError,
    BodyTooLargeError,
    ForbiddenError,
    HostNotAllowedError,
    MediaTypeError,
    MethodNotAllowedError,
    PathNotFoundError,
    RateLimitExceededError,
    UnauthorizedError,
    answer_error,
)
from trinamo.runtime.protocol.openai.generate import Delta, GenerateRequest

# Makes a generator of a function that yields nothing.
NO_DELTAS: list[Delta] = []

ROWS = [
    (errors.RequestError("m"), 400, "invalid_request_error", None),
    (errors.ContextLengthError("m"), 400, "invalid_request_error", None),
    (errors.UnsupportedEndpointError("m"), 400, "invalid_request_error", None),
    (errors.ModelNotFoundError("m"), 404, "invalid_request_error", None),
    (PathNotFoundError("m"), 404, "invalid_request_error", None),
    (MethodNotAllowedError("m"), 405, "invalid_request_error", None),
    (BodyTimeoutError("m"), 408, "invalid_request_error", None),
    (UnauthorizedError("m"), 401, "invalid_request_error", None),
    (ForbiddenError("m"), 403, "invalid_request_error", None),
    (RateLimitExceededError("m", retry_after_s=9), 429, "requests", "9"),
    (errors.RateLimitedError("m"), 429, "invalid_request_error", "1"),
    (errors.RateLimitedError("m", retry_after_s=7), 429, "invalid_request_error", "7"),
    (errors.ModelAlreadyExistsError("m"), 409, "invalid_request_error", None),
    (BodyTooLargeError("m"), 413, "invalid_request_error", None),
    (MediaTypeError("m"), 415, "invalid_request_error", None),
    (HostNotAllowedError("m"), 421, "invalid_request_error", None),
    (KilledError("m", reason=Reason.CLIENT_DISCONNECT), 499, "invalid_request_error", None),
    (errors.EngineError("m"), 500, "server_error", None),
    (errors.GrammarDeadEndError("m"), 500, "server_error", None),
    (errors.ConfigError("m"), 500, "server_error", None),
    (errors.BackendMissingError("m"), 500, "server_error", None),
    (errors.LocalProtocolError("m"), 500, "server_error", None),
    (KilledError("m"), 500, "server_error", None),
    (TrinamoError("m"), 500, "server_error", None),
    (ValueError("m"), 500, "server_error", None),
    (errors.TransportError("m"), 502, "server_error", None),
    (errors.UpstreamError("m"), 502, "server_error", None),
    (errors.TransferError("m"), 502, "server_error", None),
    (errors.StaleMemoryError("m"), 502, "server_error", None),
    (errors.IncompatibleKvError("m"), 502, "server_error", None),
    (errors.MetadataNotFoundError("m"), 502, "server_error", None),
    (errors.CorruptedError("m"), 502, "server_error", None),
    (errors.DisconnectedError("m"), 503, "server_error", "1"),
    (errors.SilentError("m"), 503, "server_error", "1"),
    (errors.UnknownOutcomeError("m"), 502, "server_error", None),
    (errors.RemoteProtocolError("m"), 502, "server_error", None),
    (KilledError("m", reason=Reason.PROTOCOL_ERROR), 502, "server_error", None),
    (errors.UnavailableError("m"), 503, "server_error", "1"),
    (ModelAwayError("m"), 503, "server_error", "1"),
    (errors.UnknownModelError("m"), 503, "server_error", "1"),
    (errors.OverloadedError("m"), 503, "server_error", "1"),
    (errors.RefusedError("m"), 503, "server_error", "1"),
    (errors.ConnectError("m"), 503, "server_error", "1"),
    (errors.ImpostorError("m"), 503, "server_error", "1"),
    (errors.ControlPlaneError("m"), 503, "server_error", "1"),
    (errors.LeaseLostError("m"), 503, "server_error", "1"),
    (errors.FencedError("m"), 503, "server_error", "1"),
    (errors.CompactedError("m"), 503, "server_error", "1"),
    (errors.EventPlaneError("m"), 503, "server_error", "1"),
    (KilledError("m", reason=Reason.WORKER_SHUTDOWN), 503, "server_error", "1"),
    (errors.DeadlineError("m"), 504, "server_error", None),
    (errors.StalledError("m"), 504, "server_error", None),
    (KilledError("m", reason=Reason.DEADLINE), 504, "server_error", None),
]


@pytest.mark.parametrize(("error", "status", "kind", "retry_after"), ROWS, ids=repr)
async def test_what_an_engine_raises_reaches_the_client_as_its_row_says(
    serve: Any, error: Exception, status: int, kind: str, retry_after: str | None
) -> None:
    async def fail(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        for never in NO_DELTAS:
            yield never
        raise error

    running = await serve(fail, queue_max=0)
    async with running.client() as client:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == status
    assert response.json()["error"]["type"] == kind
    assert response.headers.get("retry-after") == retry_after
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (errors.OverloadedError("m"), ("1", "1000", "true")),
        (errors.OverloadedError("m", retry_after_s=7), ("7", "7000", "true")),
        (RateLimitExceededError("m", retry_after_s=0.25), ("1", "250", "true")),
        (errors.UnavailableError("m"), ("1", "1000", "true")),
        (errors.EngineError("m"), (None, None, "false")),
        (ValueError("m"), (None, None, "false")),
        (errors.ModelAlreadyExistsError("m"), (None, None, "false")),
        (errors.DeadlineError("m"), (None, None, None)),
        (errors.TransportError("m"), (None, None, None)),
        (errors.RequestError("m"), (None, None, None)),
    ],
    ids=repr,
)
def test_programs_are_told_when_to_ask_again_and_whether_it_helps(
    error: Exception, headers: tuple[str | None, ...]
) -> None:
    told = {name.decode(): value.decode() for name, value in answer_error(error).headers}
    names = ("retry-after", "retry-after-ms", "x-should-retry")
    assert tuple(map(told.get, names)) == headers


def test_every_error_of_the_tree_has_a_row_under_test() -> None:
    def tree(cls: type[TrinamoError]) -> set[type[TrinamoError]]:
        return {cls}.union(*(tree(sub) for sub in cls.__subclasses__()))

    known = {cls for cls in tree(TrinamoError) if cls.__module__.startswith("trinamo.runtime.")}
    # Abstract: only its two sides are raised.
    assert known - {errors.ProtocolError} == {
        type(error) for error, *_ in ROWS if isinstance(error, TrinamoError)
    }


def test_the_error_that_matters_is_found_in_a_group() -> None:
    ours = errors.UnavailableError("ours")
    group = ExceptionGroup(
        "g", [trio.BrokenResourceError(), ExceptionGroup("h", [ours]), ValueError("v")]
    )
    assert answer_error(group).status == 503
    assert answer_error(ExceptionGroup("g", [ValueError("v")])).status == 500


@pytest.mark.parametrize(
    "error", [ValueError("insides"), errors.LocalProtocolError("insides")], ids=repr
)
def test_our_own_bugs_are_not_shown_to_clients(error: Exception) -> None:
    answer = answer_error(error)
    assert "insides" not in answer.detail.message
    assert answer.status == 500


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.7:4711",
        "10.0.0.7",
        "127.0.0.1 port 34463",
        "[fe80::1%eth0]:80",
        "::1 port 8000",
        "http://vllm-0.internal:8000/v1",
        "nats://10.0.0.7:4222",
        "vllm-0.internal:8000",
        "vm:35673",
        "localhost port 8000",
    ],
)
@pytest.mark.parametrize(
    "cls",
    [errors.DisconnectedError, errors.RemoteProtocolError, errors.UnavailableError],
)
def test_no_address_of_a_server_is_told_to_a_client(cls: type[TrinamoError], address: str) -> None:
    """The rest of the sentence is; the log has all of it."""
    error = cls(
        f"the connection to {address} broke (2f4e1a: the instance at {address}; try 2 of 3)"
    )
    told = "the connection to a server broke (2f4e1a: the instance at a server; try 2 of 3)"

    assert answer_error(error).detail.message == told
    assert answer_error(error, tells_detail=True).detail.message == str(error)


def test_what_a_client_has_written_itself_is_quoted() -> None:
    error = errors.RequestError("'image_url' is wrong: http://10.0.0.7:80/a.png is no image")
    assert answer_error(error).detail.message == str(error)


INSIDES = [
    errors.EngineError("OSError: /models/secret.gguf"),
    errors.ConnectError("no connection to 10.0.0.7:4222"),
    errors.ControlPlaneError("etcd-0.internal refused"),
    errors.EventPlaneError("nats-0.internal refused"),
]


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("error", INSIDES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("tells", [True, False])
async def test_what_failed_inside_is_in_the_log_and_with_the_client_only_if_wanted(
    serve: Any,
    caplog: pytest.LogCaptureFixture,
    *,
    tells: bool,
    error: TrinamoError,
    after: int,
    is_streamed: bool,
) -> None:
    """Before the first byte as a body, after it as the last event; by its request's id."""

    async def fail(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        for number in range(after):
            yield Delta("a", [number])
        raise error

    running = await serve(fail, engine_error_detail=tells)
    with caplog.at_level(logging.INFO):
        async with running.client() as client:
            response = await client.post(
                "/v1/completions",
                json={"prompt": "hi", "stream": is_streamed},
                headers={"x-request-id": "mine"},
            )
        await running.wait_quiet()
    assert (error.message in response.text) == tells
    assert ("under request id mine-" in response.text) != tells
    assert f'"code":"{error.code}"' in response.text
    lines = [record for record in caplog.records if error.message in str(record.__dict__)]
    assert len(lines) == 1
    assert lines[0].exc_info is None


async def test_our_own_bugs_are_told_to_nobody_whatever_is_wanted(serve: Any) -> None:
    async def fail(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
        for never in NO_DELTAS:
            yield never
        raise ValueError("/etc/insides")

    running = await serve(fail, engine_error_detail=True)
    async with running.client() as client:
        response = await client.post("/v1/completions", json={"prompt": "hi"})
    assert response.status_code == 500
    assert "insides" not in response.text
    assert "under request id " in response.text
