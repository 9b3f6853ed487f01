"""The response stream: one worker answers one request.

The worker calls the caller, greets, opens and streams. The caller may only ask it to end early:
Stop asks politely (the worker finishes and still sends Sentinel), Kill does not wait. The tables
below are the specification; what they do not list is a protocol error. A diagram of them is in
`docs/protocols/response_stream.md`.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from ...errors import DisconnectedError, KilledError
from .control import (
    Closed,
    Data,
    Declined,
    Failed,
    Handshake,
    Kill,
    Opened,
    Refused,
    Sentinel,
    Stop,
)
from .machine import End, Ended, Machine, Role, TableKey, Tables


class WorkerHalf(TableKey):
    """Where the worker's half is."""

    IDLE = "has not greeted"
    OPENING = "has greeted; the prologue is due"
    STREAMING = "the answer has begun"
    DRAINING = "nobody wants the rest: what still arrives is dropped, not an error"
    DONE = "said its last word"
    TRUNCATED = "went away without an end mark"


class CallerState(TableKey):
    """Where the caller's half is."""

    LISTENING = "wants everything"
    STOPPING = "asked to finish early, still listens"
    KILLED = "wants nothing more"
    REFUSED = "turned the worker away"
    GONE = "closed its end"


def _error(ended: Ended) -> Exception | None:
    if ended.end is End.COMPLETE:
        return None
    match ended.word:
        case Declined(error) | Failed(error):
            return error
        case Closed(why) if ended.by is Role.WORKER:
            how = why or "the worker hung up without an end mark"
            return DisconnectedError(f"{how}; the answer is not complete")
        case Exception() as error:
            return error
        case _:
            return KilledError(f"the request was killed: {ended.reason}", reason=ended.reason)


# fmt: off
_W, _C = WorkerHalf, CallerState
RESPONSE_STREAM: Final = Tables(
    name="response stream",
    start={Role.WORKER: _W.IDLE, Role.CALLER: _C.LISTENING},
    transitions={
        Role.WORKER: {
            _W.IDLE:      {Handshake: _W.OPENING, Closed: _W.TRUNCATED},
            _W.OPENING:   {Opened: _W.STREAMING, Declined: _W.DONE, Closed: _W.TRUNCATED},
            _W.STREAMING: {Data: _W.STREAMING, Sentinel: _W.DONE, Failed: _W.DONE, Closed: _W.TRUNCATED},
            _W.DRAINING:  {Handshake: _W.DRAINING, Opened: _W.DRAINING, Declined: _W.DONE,
                           Data: _W.DRAINING, Sentinel: _W.DONE, Failed: _W.DONE, Closed: _W.DONE},
            _W.DONE:      {Closed: _W.DONE},
            _W.TRUNCATED: {},
        },
        Role.CALLER: {
            _C.LISTENING: {Stop: _C.STOPPING, Kill: _C.KILLED, Refused: _C.REFUSED, Closed: _C.GONE},
            _C.STOPPING:  {Kill: _C.KILLED, Closed: _C.GONE},
            _C.KILLED:    {Closed: _C.GONE},
            _C.REFUSED:   {Closed: _C.GONE},
            _C.GONE:      {},
        },
    },
    # What one side reaches moves the other: data that crossed a Kill on the wire is dropped.
    couplings={
        (worker, caller): (Role.WORKER, _W.DRAINING)
        for worker in (_W.IDLE, _W.OPENING, _W.STREAMING)
        for caller in (_C.KILLED, _C.REFUSED, _C.GONE)
    },
    ends={
        Role.WORKER: {Sentinel: End.COMPLETE, Declined: End.FAILED, Failed: End.FAILED, Closed: End.CUT},
        Role.CALLER: {Kill: End.LEFT, Refused: End.REFUSED, Closed: End.CUT},
    },
    error=_error,
)
# fmt: on


response_stream: Final = partial(Machine, RESPONSE_STREAM)
"""Makes a fresh machine for one, in a role."""
