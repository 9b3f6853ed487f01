"""Why a request was stopped or killed, and how a Stop, a Kill or a cancel says so on the wire.

The word is `Reason`'s value. A peer of another version may say one that is unknown here, or none:
then it is the reason that the frame has by default, and the frame counts all the same.
"""

from __future__ import annotations

import enum


class Reason(enum.StrEnum):
    """Why a request was stopped or killed; the label of the cancellation metric."""

    CLIENT_DISCONNECT = "client_disconnect"
    DEADLINE = "deadline"
    STOP_REQUESTED = "stop_requested"
    CONSUMER_DROPPED = "consumer_dropped"
    FRONTEND_SHUTDOWN = "frontend_shutdown"
    WORKER_SHUTDOWN = "worker_shutdown"
    PROTOCOL_ERROR = "protocol_error"


def known_reason(word: str, default: Reason) -> Reason:
    """The reason that a peer's `word` stands for; `default` for one that is unknown here."""
    try:
        return Reason(word)
    except ValueError:
        return default
