"""The rows of the request stream's table that a request's story is made of."""

from __future__ import annotations

import pytest

from trinamo.runtime.errors import LocalProtocolError, RemoteProtocolError
from trinamo.runtime.protocol.streams.control import (
    Closed,
    Control,
    Data,
    Handshake,
    Kill,
    Opened,
    Refused,
    Sentinel,
    Stop,
)
from trinamo.runtime.protocol.streams.machine import Role
from trinamo.runtime.protocol.streams.request import StreamType
from trinamo.runtime.protocol.streams.request_stream import (
    InputState,
    ReceiverState,
    request_stream,
)

GREETING = Handshake("s", StreamType.REQUEST)
ITEM = Data(b"x")

W, C = Role.WORKER, Role.CALLER
Step = tuple[Role, Control]


def play(ours: Role, *steps: Step) -> tuple[ReceiverState, InputState]:
    machine = request_stream(ours)
    for role, event in steps:
        (machine.send if role is ours else machine.receive)(event)
    return machine.states[W], machine.states[C]


@pytest.mark.parametrize("ours", list(Role))
@pytest.mark.parametrize(
    ("steps", "states"),
    [
        pytest.param(
            [(W, GREETING), (C, ITEM), (C, ITEM), (C, Sentinel()), (C, Closed()), (W, Closed())],
            (ReceiverState.GONE, InputState.GONE),
            id="complete",
        ),
        pytest.param(
            [(W, GREETING), (C, Stop())],
            (ReceiverState.RECEIVING, InputState.STOPPED),
            id="stopped",
        ),
        pytest.param(
            [(C, Kill()), (W, GREETING)],
            (ReceiverState.RECEIVING, InputState.KILLED),
            id="killed before the worker called",
        ),
        pytest.param(
            [(W, GREETING), (C, ITEM), (C, Closed())],
            (ReceiverState.RECEIVING, InputState.TRUNCATED),
            id="truncated",
        ),
        pytest.param(
            [(C, Refused("unknown_subject", "")), (W, GREETING), (W, Closed())],
            (ReceiverState.GONE, InputState.REFUSED),
            id="refused",
        ),
        pytest.param(
            [(W, GREETING), (W, Closed()), (C, ITEM)],
            (ReceiverState.GONE, InputState.SENDING),
            id="the worker drops the input",
        ),
    ],
)
def test_a_story_of_the_specification_is_legal_seen_from_either_end(
    ours: Role, steps: list[Step], states: tuple[ReceiverState, InputState]
) -> None:
    assert play(ours, *steps) == states


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([(C, ITEM)], id="data before the handshake"),
        pytest.param([(W, GREETING), (W, GREETING)], id="a second handshake"),
        pytest.param([(W, GREETING), (W, Opened())], id="a prologue on a request connection"),
        pytest.param([(W, GREETING), (W, ITEM)], id="data from the worker"),
        pytest.param([(W, GREETING), (W, Stop())], id="stop from the worker"),
        pytest.param([(W, GREETING), (W, Kill())], id="kill from the worker"),
        pytest.param([(W, GREETING), (C, Sentinel()), (C, Sentinel())], id="two end marks"),
        pytest.param([(W, GREETING), (C, Sentinel()), (C, Kill())], id="kill after the end"),
        pytest.param([(W, GREETING), (C, Stop()), (C, ITEM)], id="data after stop"),
        pytest.param([(W, GREETING), (C, Stop()), (C, Kill())], id="kill after stop"),
    ],
)
def test_the_last_step_is_forbidden_and_the_error_says_whose_fault_it_is(steps: list[Step]) -> None:
    culprit = steps[-1][0]
    play(culprit, *steps[:-1])
    with pytest.raises(LocalProtocolError):
        play(culprit, *steps)
    with pytest.raises(RemoteProtocolError):
        play(culprit.other, *steps)
