"""Server-sent events read from whole bytes, by the words of the standard: what tests hold readers to."""

from __future__ import annotations

import attrs


@attrs.frozen
class ServerSentEvent:
    """One event; `event` is empty unless the server named one."""

    data: str
    event: str = ""


def parse_events(body: bytes) -> list[ServerSentEvent]:
    """All that end in `body`; https://html.spec.whatwg.org/multipage/server-sent-events.html."""
    text = body.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    events, data, name = list[ServerSentEvent](), list[str](), ""
    for line in text.split("\n")[:-1]:
        field, _, value = line.partition(":")
        if field == "data":
            data.append(value.removeprefix(" "))
        elif field == "event":
            name = value.removeprefix(" ")
        elif not line:
            if data:
                events.append(ServerSentEvent("\n".join(data), name))
            data, name = [], ""
    return events
