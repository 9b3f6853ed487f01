"""The request stream: a caller streams its input to one worker.

The worker calls the caller and greets, like on a response stream; then the caller sends data and
exactly one end mark: Sentinel (the input is complete), Stop or Kill. A stream that ends before
one of them is truncated input, which kills the context. The worker says nothing after its
greeting. A diagram of the tables is in `docs/protocols/request_stream.md`.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from ...errors import KilledError
from .control import Closed, Data, Handshake, Kill, Refused, Sentinel, Stop
from .machine import End, Ended, Machine, Role, TableKey, Tables


class ReceiverState(TableKey):
    """Where the worker's half is."""

    IDLE = "has not greeted"
    RECEIVING = "has greeted; input arrives"
    TURNED_AWAY = "was refused"
    GONE = "closed its end"


class InputState(TableKey):
    """Where the caller's half is."""

    WAITING = "no worker has greeted yet"
    SENDING = "input goes out"
    COMPLETE = "all input was sent"
    STOPPED = "asked to finish early"
    KILLED = "wants nothing more"
    REFUSED = "turned the worker away"
    TRUNCATED = "went away without an end mark"
    GONE = "closed its end"


def _error(ended: Ended) -> Exception | None:
    if ended.end in (End.COMPLETE, End.STOPPED):
        return None
    if isinstance(ended.word, KilledError):
        return ended.word
    return KilledError("the input ended without an end mark", reason=str(ended.reason))


# fmt: off
_R, _I = ReceiverState, InputState
REQUEST_STREAM: Final = Tables(
    name="request stream",
    start={Role.WORKER: _R.IDLE, Role.CALLER: _I.WAITING},
    transitions={
        Role.WORKER: {
            _R.IDLE:        {Handshake: _R.RECEIVING, Closed: _R.GONE},
            _R.RECEIVING:   {Closed: _R.GONE},
            _R.TURNED_AWAY: {Handshake: _R.RECEIVING, Closed: _R.GONE},
            _R.GONE:        {},
        },
        Role.CALLER: {
            _I.WAITING:   {Refused: _I.REFUSED, Kill: _I.KILLED, Closed: _I.TRUNCATED},
            _I.SENDING:   {Data: _I.SENDING, Sentinel: _I.COMPLETE, Stop: _I.STOPPED, Kill: _I.KILLED,
                           Refused: _I.REFUSED, Closed: _I.TRUNCATED},
            _I.COMPLETE:  {Closed: _I.GONE},
            _I.STOPPED:   {Closed: _I.GONE},
            _I.KILLED:    {Closed: _I.GONE},
            _I.REFUSED:   {Closed: _I.GONE},
            _I.TRUNCATED: {},
            _I.GONE:      {},
        },
    },
    couplings={
        (_R.RECEIVING, _I.WAITING): (Role.CALLER, _I.SENDING),
        (_R.IDLE, _I.REFUSED): (Role.WORKER, _R.TURNED_AWAY),
    },
    ends={
        Role.WORKER: {Closed: End.CUT},
        Role.CALLER: {Sentinel: End.COMPLETE, Stop: End.STOPPED, Kill: End.LEFT, Refused: End.REFUSED,
                      Closed: End.CUT},
    },
    error=_error,
)
# fmt: on


request_stream: Final = partial(Machine, REQUEST_STREAM)
"""Makes a fresh machine for one, in a role."""
