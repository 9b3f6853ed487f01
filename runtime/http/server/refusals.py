"""Answers that no application makes: whole, and the last on their connection."""

from __future__ import annotations

import http
from typing import Final

from ...errors import OverloadedError
from ...protocol.openai.http_head import HeadFault
from ..status import ErrorAnswer, HostNotAllowedError, answer_error, answer_head_fault

HOST_ANSWER: Final = answer_error(
    HostNotAllowedError(
        "the Host header names another server; call this one by its address or by localhost, or"
        " add the name to 'http.hosts' of its configuration"
    )
)


def overload_response(connections_max: int) -> bytes:
    """To a connection over the limit."""
    return _closing_response(
        answer_error(
            OverloadedError(
                f"{connections_max} connections are open, which is the limit",
                bound="connections_max",
                value=connections_max,
            )
        )
    )


def fault_response(fault: HeadFault | None, status: int) -> bytes:
    """To a head that is refused: for `fault`, or with `status` for what a parser did not like."""
    return _closing_response(
        answer_head_fault(
            fault
            or HeadFault(
                status, f"this is no HTTP request: {http.HTTPStatus(status).phrase.lower()}"
            )
        )
    )


def _closing_response(answer: ErrorAnswer) -> bytes:
    body = answer.to_body()
    retry = "" if answer.retry_after_s is None else f"retry-after: {answer.retry_after_s}\r\n"
    return (
        f"HTTP/1.1 {answer.status} {http.HTTPStatus(answer.status).phrase}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        f"{retry}connection: close\r\n\r\n"
    ).encode() + body
