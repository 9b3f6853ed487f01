"""The rows of the response stream's table that a request's story is made of."""

from __future__ import annotations

import pytest

from trinamo.runtime.errors import (
    EngineError,
    LocalProtocolError,
    RemoteProtocolError,
)
from trinamo.runtime.protocol.streams.control import (
    Closed,
    Control,
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
from trinamo.runtime.protocol.streams.machine import Role
from trinamo.runtime.protocol.streams.request import StreamType
from trinamo.runtime.protocol.streams.response_stream import (
    CallerState,
    WorkerHalf,
    response_stream,
)

GREETING = Handshake("s", StreamType.RESPONSE)
ITEM = Data(b"x")
OOPS = EngineError("oops")

W, C = Role.WORKER, Role.CALLER
Step = tuple[Role, Control]


def play(ours: Role, *steps: Step) -> tuple[WorkerHalf, CallerState]:
    machine = response_stream(ours)
    for role, event in steps:
        (machine.send if role is ours else machine.receive)(event)
    return machine.states[W], machine.states[C]


@pytest.mark.parametrize("ours", list(Role))
@pytest.mark.parametrize(
    ("steps", "states"),
    [
        pytest.param(
            [(W, GREETING), (W, Opened()), (W, ITEM), (W, ITEM), (W, Sentinel()), (C, Closed())],
            (WorkerHalf.DONE, CallerState.GONE),
            id="finishes",
        ),
        pytest.param(
            [(W, GREETING), (W, Declined(OOPS)), (W, Closed())],
            (WorkerHalf.DONE, CallerState.LISTENING),
            id="raises before the first item",
        ),
        pytest.param(
            [(W, GREETING), (W, Opened()), (W, ITEM), (W, Failed(OOPS)), (W, Closed())],
            (WorkerHalf.DONE, CallerState.LISTENING),
            id="raises later",
        ),
        pytest.param(
            [(W, GREETING), (W, Opened()), (C, Stop()), (W, ITEM), (W, Sentinel())],
            (WorkerHalf.DONE, CallerState.STOPPING),
            id="stop drains",
        ),
        pytest.param(
            [(W, GREETING), (W, Opened()), (C, Kill()), (W, ITEM), (W, Sentinel()), (W, Closed())],
            (WorkerHalf.DONE, CallerState.KILLED),
            id="data crosses a kill",
        ),
        pytest.param(
            [(W, GREETING), (C, Stop()), (C, Kill()), (C, Closed()), (W, Opened())],
            (WorkerHalf.DRAINING, CallerState.GONE),
            id="stop then kill",
        ),
        pytest.param(
            [(W, GREETING), (W, Opened()), (W, ITEM), (W, Closed())],
            (WorkerHalf.TRUNCATED, CallerState.LISTENING),
            id="worker dies",
        ),
        pytest.param(
            [(W, GREETING), (W, Opened()), (C, Closed()), (W, ITEM)],
            (WorkerHalf.DRAINING, CallerState.GONE),
            id="caller dies",
        ),
        pytest.param(
            [(W, GREETING), (C, Refused("unknown_subject", "")), (W, Opened()), (W, ITEM)],
            (WorkerHalf.DRAINING, CallerState.REFUSED),
            id="refused",
        ),
    ],
)
def test_a_story_of_the_specification_is_legal_seen_from_either_end(
    ours: Role, steps: list[Step], states: tuple[WorkerHalf, CallerState]
) -> None:
    assert play(ours, *steps) == states


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([(W, ITEM)], id="data before the handshake"),
        pytest.param([(W, GREETING), (W, ITEM)], id="data before the prologue"),
        pytest.param([(W, GREETING), (W, GREETING)], id="a second handshake"),
        pytest.param([(W, GREETING), (W, Opened()), (W, Opened())], id="a second prologue"),
        pytest.param([(W, GREETING), (W, Sentinel())], id="sentinel before the prologue"),
        pytest.param([(W, GREETING), (W, Failed(OOPS))], id="failed before the prologue"),
        pytest.param([(W, GREETING), (W, Opened()), (W, Stop())], id="stop from a worker"),
        pytest.param([(W, GREETING), (W, Opened()), (W, Kill())], id="kill from a worker"),
        pytest.param(
            [(W, GREETING), (W, Opened()), (W, Sentinel()), (W, ITEM)], id="after the end"
        ),
        pytest.param([(W, GREETING), (C, Sentinel())], id="sentinel from a caller"),
        pytest.param([(W, GREETING), (C, ITEM)], id="data from a caller"),
        pytest.param([(W, GREETING), (C, Stop()), (C, Stop())], id="stop twice"),
        pytest.param([(W, GREETING), (C, Kill()), (C, Kill())], id="kill twice"),
        pytest.param([(W, GREETING), (C, Kill()), (C, Stop())], id="stop after kill"),
        pytest.param([(W, GREETING), (C, Stop()), (C, Refused("", ""))], id="refused after stop"),
    ],
)
def test_the_last_step_is_forbidden_and_the_error_says_whose_fault_it_is(steps: list[Step]) -> None:
    culprit = steps[-1][0]
    play(culprit, *steps[:-1])
    with pytest.raises(LocalProtocolError):
        play(culprit, *steps)
    with pytest.raises(RemoteProtocolError):
        play(culprit.other, *steps)
