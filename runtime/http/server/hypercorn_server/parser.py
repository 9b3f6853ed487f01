"""h11, without what it lets pass: the head of a request is judged by `protocol/openai/http_head.py` too."""

from __future__ import annotations

from typing import Any

import h11

from ....protocol.openai.http_head import HeadFault, find_fault_in_bytes, find_fault_in_fields

__all__ = ["StrictParser"]


class StrictParser(h11.Connection):
    """A server's parser. After a `fault`, as after an error of h11, there is no next event."""

    def __init__(self, *, header_bytes_max: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=header_bytes_max)
        self.fault: HeadFault | None = None

    def next_event(self) -> Any:
        """What h11 makes of the bytes; raises `h11.RemoteProtocolError` with the status to answer."""
        if self.their_state is h11.IDLE:
            self._refuse(find_fault_in_bytes(self.trailing_data[0]))
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._refuse(find_fault_in_fields(event.http_version, event.headers))
        return event

    def _refuse(self, fault: HeadFault | None) -> None:
        self.fault = self.fault or fault
        if self.fault is not None:
            raise h11.RemoteProtocolError(self.fault.reason, self.fault.status)
