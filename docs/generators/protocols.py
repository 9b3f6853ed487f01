"""The transition tables as pages: a mermaid diagram and a table for each role.

`make docs` writes `docs/protocols/`; a test keeps the pages
equal to the code. `render` is a pure function of the tables; only `main` touches files.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from trinamo.runtime.errors import EngineError
from trinamo.runtime.protocol.discovery.presence import PRESENCE, InstanceFault, Presence, Sign
from trinamo.runtime.protocol.streams.control import (
    Closed,
    Declined,
    Failed,
    Kill,
    Refused,
    Sentinel,
    Stop,
)
from trinamo.runtime.protocol.streams.machine import End, Ended, Role, Tables
from trinamo.runtime.protocol.streams.request import Reason
from trinamo.runtime.protocol.streams.request_stream import REQUEST_STREAM
from trinamo.runtime.protocol.streams.response_stream import RESPONSE_STREAM

PresenceTable = Mapping[Presence, Mapping[Sign, Presence]]

TABLES: Final[Mapping[str, Tables | PresenceTable]] = {
    "response_stream": RESPONSE_STREAM,
    "request_stream": REQUEST_STREAM,
    "presence": PRESENCE,
}
"""By the page in `docs/protocols/` that shows them."""


_PREFACE: Final = """\
What each end may send, and what it may receive, in every state.

Made from the tables in the code by `make docs`. A step that is
not listed is a `LocalProtocolError` when we were about to take it, and a `RemoteProtocolError` when
the peer took it.
"""


_ENDS_PREFACE: Final = """\
Decided once, by `Machine.ended`: the first of these counts, whatever is said later, and everybody asks there
how the stream ended, who ended it and why. But whoever leaves gets its own error in place of an end that it has
not had: after a Kill nothing is handed out, and without what was dropped no answer is complete.
"""


_WORDS: Final[Mapping[type, object]] = {
    Sentinel: Sentinel(),
    Declined: Declined(EngineError("")),
    Failed: Failed(EngineError("")),
    Closed: Closed(),
    Stop: Stop(),
    Kill: Kill(),
    Refused: Refused("", ""),
}


_ENDS_OF_ITS_OWN: Final = (
    (End.BROKEN, "a breach of this table", "`RemoteProtocolError`, or, of input, `KilledError`"),
    (End.GIVEN_UP, "such as an instance that vanished", "that error"),
)


_REASONS_PREFACE: Final = """\
Stop and Kill say why, and so does the cancel of a unary request: the caller's reason is the handler's
`context.reason`, and the label of both ends' cancellation metrics. The reason is the data of the frame;
without any Stop and Kill mean the first two reasons below. A reason that the receiver does not know counts
as the one that the bare frame has. A link that ends without a word is `consumer_dropped`.
"""


_MEANINGS: Final = {
    Reason.STOP_REQUESTED: "the caller asks for an early, complete end",
    Reason.CONSUMER_DROPPED: "the caller left the answer, or is gone",
    Reason.CLIENT_DISCONNECT: "the HTTP client went away",
    Reason.DEADLINE: "the request's time is up",
    Reason.FRONTEND_SHUTDOWN: "the frontend that asked shuts down",
    Reason.WORKER_SHUTDOWN: "the worker shuts down",
    Reason.PROTOCOL_ERROR: "the other end broke the protocol",
}


_PRESENCE_PREFACE: Final = """\
When a router takes a worker for gone, and what becomes of its requests.

Made from the table in the code by `make docs`; why is in
decisions [0009](../decisions/0009-silence-of-the-vanished.md),
[0011](../decisions/0011-deleted-but-reached.md) and
[0013](../decisions/0013-silent-workers-are-asked.md). The table is the program: what a state does not
list changes nothing. A request is *silent* once it has brought nothing for `router.silence_grace_s`,
counted from its ACK, or from when a unary request is sent; not while its consumer does not read. It
ends with `DisconnectedError`, and Kill and FIN go to the worker:

* if it waits for its first item, when the instance has LEFT;
* if it has begun, when it is silent and the instance was deleted a grace ago;
* if it is silent, when the instance has given no sign of life for two graces, and no answer to any
  probe all through the second; an item on another stream is a sign of life;
* if it is silent, when the instance is REPLACED.
"""


_FAULTS_PREFACE: Final = """\
An instance that is there may be *faulty*: it is passed over while another lives, and shown as `inhibited`
(as `connection lost` or `cannot be reached` where none stands). It is faulty until the last of its faults is over:
"""


def protocol_page(tables: Tables | PresenceTable) -> str:
    """One page of markdown for one protocol; ends with a newline."""
    if not isinstance(tables, Tables):
        return _render_presence(tables)
    parts = [
        f"# The {tables.name}\n",
        _PREFACE,
    ]
    for role in Role:
        parts.append(f"## The {role.value}\n")
        parts.append(_diagram(tables, role))
        parts.append(_table(tables.transitions[role]))
    parts.append("## What one end's step does to the other\n")
    parts.append(_couplings(tables))
    parts += ["## How it ends\n", _ENDS_PREFACE, _ends(tables)]
    parts += ["## Why\n", _REASONS_PREFACE, _reasons()]
    return "\n".join(parts)


def _ends(tables: Tables) -> str:
    lines = ["| by | what | end | meaning | behind the last item comes |", "|---|---|---|---|---|"]
    for role, ends in tables.ends.items():
        for step, end in ends.items():
            error = tables.error(Ended(end, role, _WORDS[step]))
            comes = "the end" if error is None else f"`{type(error).__name__}`"
            if step in (Declined, Failed):
                comes = "the handler's error"
            lines.append(f"| {role.value} | {step.__name__} | {end.name} | {end.value} | {comes} |")
    for end, what, comes in _ENDS_OF_ITS_OWN:
        lines.append(f"| either | {what} | {end.name} | {end.value} | {comes} |")
    return "\n".join([*lines, ""])


def _reasons() -> str:
    usual = {Stop().reason: "Stop", Kill().reason: "Kill"}
    lines = ["| reason | meaning | unsaid in |", "|---|---|---|"]
    ordered = [*usual, *(reason for reason in Reason if reason not in usual)]
    lines += [
        f"| `{reason.value}` | {_MEANINGS[reason]} | {usual.get(reason, '')} |"
        for reason in ordered
    ]
    return "\n".join([*lines, ""])


def _render_presence(table: PresenceTable) -> str:
    lines = ["# The presence of a worker\n", _PRESENCE_PREFACE]
    lines += ["```mermaid", "stateDiagram-v2", f"    [*] --> {Presence.LISTED.name}"]
    for state, steps in table.items():
        lines += [f"    {state.name} --> {into.name}: {sign.name}" for sign, into in steps.items()]
        if not steps:
            lines.append(f"    {state.name} --> [*]")
    lines += ["```", "", "| state | meaning | sign | next state |", "|---|---|---|---|"]
    for state, steps in table.items():
        lines += [
            f"| {state.name} | {state.value} | {sign.name} | {into.name} |"
            for sign, into in steps.items()
        ] or [f"| {state.name} | {state.value} | none | |"]
    lines += ["", "| sign | meaning |", "|---|---|"]
    lines += [f"| {sign.name} | {sign.value} |" for sign in Sign]
    lines += ["", _FAULTS_PREFACE, "| fault | meaning |", "|---|---|"]
    lines += [f"| {fault.name} | {' '.join(fault.value.split())} |" for fault in InstanceFault]
    return "\n".join([*lines, ""])


def _diagram(tables: Tables, role: Role) -> str:
    rows = tables.transitions[role]
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {tables.start[role].name}"]
    for state, steps in rows.items():
        arrows: dict[enum.Enum, list[str]] = {}
        for event, following in steps.items():
            arrows.setdefault(following, []).append(event.__name__)
        lines += [
            f"    {state.name} --> {following.name}: {', '.join(events)}"
            for following, events in arrows.items()
        ]
        if not steps:
            lines.append(f"    {state.name} --> [*]")
    lines += [
        f"    {before.name} --> {into.name}: {role.other.value} is {other.name}"
        for before, other, into in _moved(tables, role)
    ]
    return "\n".join([*lines, "```", ""])


def _moved(tables: Tables, role: Role) -> list[tuple[enum.Enum, enum.Enum, enum.Enum]]:
    """The couplings that move `role`: its state before, the other end's state, its state after."""
    return [
        (worker, caller, into) if role is Role.WORKER else (caller, worker, into)
        for (worker, caller), (moved, into) in tables.couplings.items()
        if moved is role
    ]


def _table(rows: Mapping[enum.Enum, Mapping[type, enum.Enum]]) -> str:
    lines = ["| state | meaning | step | next state |", "|---|---|---|---|"]
    for state, steps in rows.items():
        lines += [
            f"| {state.name} | {state.value} | {event.__name__} | {following.name} |"
            for event, following in steps.items()
        ] or [f"| {state.name} | {state.value} | none | |"]
    return "\n".join([*lines, ""])


def _couplings(tables: Tables) -> str:
    lines = ["| worker | caller | moves |", "|---|---|---|"]
    lines += [
        f"| {worker.name} | {caller.name} | the {moved.value} to {into.name} |"
        for (worker, caller), (moved, into) in tables.couplings.items()
    ]
    return "\n".join([*lines, ""])
