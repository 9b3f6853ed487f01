"""What is said on one link: frames, items and messages into few large sends, and back.

Sans-IO; the frames themselves are in `link_frames.py`. Only workers open streams, and the ids that they
give only grow, so a frame for a stream that is not live is either late, and dropped, or for one that
never was, which is a protocol error of the link. Peer bytes raise nothing but `RemoteProtocolError`.
What a stream may say when is in `response_stream.py` and `request_stream.py`, how much in `credit.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from typing import Final

from ...errors import RemoteProtocolError
from .codec import HEADER_BYTES_MAX, Frame, FrameDecoder
from .control import Closed, Control
from .link_frames import (
    ADDED_FROM,
    HEAD_BYTES,
    MESSAGES_FROM,
    Credit,
    Kind,
    LinkMessage,
    Opening,
    encode_batch,
    encode_event,
    encode_item,
    encode_message,
    parse_event,
    parse_opening,
)

PART_BYTES: Final = 16 * 1024
"""A longer item is sent in parts, so that it delays no other stream by more than one."""
_PARTED_MAX: Final = 4
"""Items and messages of a link that may be on their way in parts at once."""
_BATCH_ITEMS_MAX: Final = 1024
_BATCH_BYTES_MAX: Final = 256 * 1024
_DATA_BYTES_MAX: Final = 512 * 1024
_STREAM_MAX: Final = MESSAGES_FROM - 1
_U32_MAX: Final = 0xFFFFFFFF
_OPEN, _DATA, _PART, _BATCH = int(Kind.OPEN), int(Kind.DATA), int(Kind.PART), int(Kind.BATCH)
_MESSAGES: Final = {int(kind): kind for kind in (Kind.REQUEST, Kind.ANSWER)}
_PAIRS: Final = struct.Struct(">II")


class StreamIds:
    """The ids of one link: they only grow, and none is given twice."""

    __slots__ = ("newest",)

    def __init__(self) -> None:
        self.newest = 0
        """The last that was given; every lower one is or was a stream."""

    @property
    def is_exhausted(self) -> bool:
        """Whether no more streams can be opened on this link."""
        return self.newest >= _STREAM_MAX

    def give(self) -> int:
        """The worker's end: the id of a new stream."""
        assert not self.is_exhausted, "a link beyond its last id"
        self.newest += 1
        return self.newest

    def opened(self, stream: int) -> None:
        """The caller's end: the worker opens `stream`; `RemoteProtocolError` if it was before."""
        if stream <= self.newest:
            raise RemoteProtocolError(f"stream {stream} is opened after {self.newest}")
        self.newest = stream

    def check(self, stream: int) -> None:
        """A frame for no live stream: fine if it is late, `RemoteProtocolError` if it never was."""
        if not 0 < stream <= self.newest:
            raise RemoteProtocolError(f"a frame for stream {stream}, which never was")


class Multiplexer:
    """The outgoing half of a link: frames, items and messages in, few large sends out."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._pairs: list[int] = []
        self._items: list[bytes] = []
        self._batch_bytes = 0
        self._parted: list[tuple[int, memoryview]] = []
        self._message_heads: dict[int, tuple[Kind, bytes]] = {}
        """Of messages that go in parts: what their last frame says."""
        self._last_number = _STREAM_MAX
        self.queued_bytes = 0
        """Of frames and items; of what goes in parts only those that are due."""
        self.message_bytes = 0
        """Of messages, those in parts as a whole."""

    @property
    def is_empty(self) -> bool:
        return not (self._frames or self._items or self._parted)

    @property
    def takes_messages(self) -> bool:
        """Whether fewer long messages wait than may be on their way at once."""
        return len(self._message_heads) < _PARTED_MAX

    def add(self, frame: bytes) -> None:
        """A frame, after all that was added before it."""
        if self._items:
            self._end_batch()
        self._frames.append(frame)
        self.queued_bytes += len(frame)

    def add_item(self, stream: int, item: bytes) -> None:
        """A whole item of at most `PART_BYTES`."""
        self._pairs += (stream, len(item))
        self._items.append(item)
        self.queued_bytes += len(item)
        self._batch_bytes += len(item)
        if self._batch_bytes >= _BATCH_BYTES_MAX or len(self._items) >= _BATCH_ITEMS_MAX:
            self._end_batch()

    def add_in_parts(self, stream: int, item: bytes) -> None:
        """A longer item. Until `take` tells that it is out, nothing more of its stream may be added."""
        self._parted.append((stream, memoryview(item)))

    def add_message(self, kind: Kind, header: bytes, payload: bytes) -> int:
        """A request or an answer; the number to `drop_message` it by if it is long, else 0."""
        self.message_bytes += len(header) + len(payload)
        if len(payload) <= PART_BYTES:
            self.add(encode_message(kind, header, payload))
            return 0
        number = self._last_number + 1 if self._last_number < _U32_MAX else MESSAGES_FROM
        self._last_number = number
        self._message_heads[number] = (kind, header)
        self._parted.append((number, memoryview(payload)))
        return number

    def drop_message(self, number: int) -> bool:
        """Send no more of a long message; whether there was more to send, so that it never arrives."""
        head = self._message_heads.pop(number, None)
        if head is None:
            return False
        left = next(len(rest) for stream, rest in self._parted if stream == number)
        self.message_bytes -= len(head[1]) + left
        self.drop(number)
        self.add(encode_event(number, Closed()))
        return True

    def drop(self, stream: int) -> None:
        """Send no more parts of the item of `stream`."""
        self._parted = [entry for entry in self._parted if entry[0] != stream]

    def take(self) -> tuple[bytes, list[int]]:
        """What to send next, and the streams whose long item is all in it.

        One part of each of the items that have their turn, so what is added meanwhile waits for
        these and no more.
        """
        if self._items:
            self._end_batch()
        frames, self._frames = self._frames, []
        heads = self._message_heads
        self.message_bytes = (
            sum(len(rest) for stream, rest in self._parted if stream in heads) if heads else 0
        )
        finished: list[int] = []
        if self._parted:
            left = self._parted[_PARTED_MAX:]
            for stream, rest in self._parted[:_PARTED_MAX][::-1]:
                is_last = len(rest) <= PART_BYTES
                part = rest[:PART_BYTES].tobytes()
                if not is_last:
                    left.insert(0, (stream, rest[PART_BYTES:]))
                    frames.append(encode_item(stream, part, is_last=False))
                elif stream in self._message_heads:
                    kind, header = self._message_heads.pop(stream)
                    frames.append(encode_message(kind, header, part, stream))
                else:
                    finished.append(stream)
                    frames.append(encode_item(stream, part))
            self._parted = left
        self.queued_bytes = 0
        return frames[0] if len(frames) == 1 else b"".join(frames), finished

    def _end_batch(self) -> None:
        self._frames.append(encode_batch(self._pairs, self._items))
        self._pairs, self._items, self._batch_bytes = [], [], 0


Arrival = tuple[int, list[bytes] | Control | Opening | Credit | LinkMessage | RemoteProtocolError]
"""A stream, and what came for it: all its items up to the next event, or one event.

An error is one of that stream alone. A message is of no stream, whatever its number; the last word of a
link is of stream 0.
"""


class Demultiplexer:
    """The incoming half of a link: bytes in; out, messages, and for each stream its items and events.

    `live` are the streams that something may come for. They may change while `feed` is iterated.
    """

    def __init__(
        self,
        live: Collection[int],
        ids: StreamIds,
        *,
        item_bytes_max: int,
        header_bytes_max: int = HEADER_BYTES_MAX,
    ) -> None:
        self._live = live
        self._ids = ids
        self._item_bytes_max = item_bytes_max
        self._decoder = FrameDecoder(
            header_bytes_max=HEAD_BYTES + header_bytes_max, data_bytes_max=_DATA_BYTES_MAX
        )
        self._parted: dict[int, bytearray] = {}
        self.parted_bytes = 0
        self.skipped_count = 0
        """Frames that a newer minor has added."""

    @property
    def pending_bytes(self) -> int:
        """Bytes of frames and of items that are not whole yet."""
        return self._decoder.pending_bytes + self.parted_bytes

    def forget(self, stream: int) -> None:
        """`stream` is no more: drop the parts of its item."""
        if self._parted:
            self.parted_bytes -= len(self._parted.pop(stream, b""))

    def feed(self, data: bytes) -> Iterator[Arrival]:
        """What the bytes complete, in order for each stream; iterate it to its end.

        Raises `RemoteProtocolError`, for the whole link, after all that came before the fault.
        """
        items: dict[int, list[bytes]] = {}
        fault: RemoteProtocolError | None = None
        try:
            for frame in self._decoder.feed(data):
                header = frame[0]
                kind = header[4] if len(header) >= HEAD_BYTES else 0
                if kind == _BATCH:
                    self._split(frame, items)
                elif kind:
                    stream = int.from_bytes(header[:4], "big")
                    what = self._take(frame, kind, stream, items)
                    if what is not None:
                        if stream in items:
                            yield stream, items.pop(stream)
                        yield stream, what
                elif header or frame[1]:
                    fault = RemoteProtocolError(f"a frame with a header of {len(header)} bytes")
                    break
            if fault is None:
                self._decoder.check()
        except RemoteProtocolError as error:
            fault = error
        yield from items.items()
        if fault is not None:
            raise fault

    def _split(self, frame: Frame, items: dict[int, list[bytes]]) -> None:
        header, data = frame
        if len(header) % 8 != HEAD_BYTES or header[:4] != b"\0\0\0\0":
            raise RemoteProtocolError(f"a batch with a header of {len(header)} bytes")
        start = 0
        for stream, item_bytes in _PAIRS.iter_unpack(header[HEAD_BYTES:]):
            end = start + item_bytes
            item = data[start:end]
            start = end
            if not item or stream in self._parted:
                raise RemoteProtocolError(f"an item of {item_bytes} bytes out of turn in a batch")
            if stream not in self._live:
                self._ids.check(stream)
            elif stream in items:
                items[stream].append(item)
            else:
                items[stream] = [item]
        if start != len(data):
            raise RemoteProtocolError(f"a batch of {start} bytes in {len(data)}")

    def _take(
        self, frame: Frame, kind: int, stream: int, items: dict[int, list[bytes]]
    ) -> Control | Opening | Credit | LinkMessage | RemoteProtocolError | None:
        """What a frame says by itself; None if it is late, of an item, or of a newer minor."""
        header, data = frame
        if kind >= ADDED_FROM:
            self.skipped_count += 1
            return None
        if kind in _MESSAGES:
            return self._message(_MESSAGES[kind], stream, header[HEAD_BYTES:], data)
        if kind == _OPEN:
            opening = parse_opening(header, data)
            self._ids.opened(stream)
            return opening
        if stream not in self._live:
            return self._take_streamless(frame, kind, stream)
        if kind == _DATA:
            whole = self._whole(stream, data)
            if whole is not None:
                items.setdefault(stream, []).append(whole)
                return None
        elif kind != _PART:
            return parse_event(kind, header, data)
        elif self._keep(stream, data):
            return None
        return RemoteProtocolError(f"an item over {self._item_bytes_max} bytes")

    def _take_streamless(self, frame: Frame, kind: int, stream: int) -> Control | Credit | None:
        """A part of a message, the last word of the link, or what is late."""
        if stream >= MESSAGES_FROM:
            # A part of a long message, or that its rest will not come.
            if kind == Kind.CLOSED and not frame[1]:
                self.forget(stream)
            elif kind != _PART:
                raise RemoteProtocolError(f"a frame of kind {kind} for message {stream}")
            elif not self._keep(stream, frame[1]):
                raise RemoteProtocolError(f"a message over {self._item_bytes_max} bytes")
        elif not stream and kind == Kind.REFUSED:
            return parse_event(kind, *frame)
        else:
            # What is late may be anything; a part of it must not be kept.
            self._ids.check(stream)
        return None

    def _message(self, kind: Kind, number: int, header: bytes, data: bytes) -> LinkMessage:
        payload: bytes | None = data
        if number:
            if number not in self._parted:
                raise RemoteProtocolError(f"the last part of message {number}, which never began")
            payload = self._whole(number, data)
        elif len(data) > self._item_bytes_max:
            payload = None
        if payload is None:
            raise RemoteProtocolError(f"a message over {self._item_bytes_max} bytes")
        return LinkMessage(kind, header, payload)

    def _whole(self, stream: int, data: bytes) -> bytes | None:
        """The item that ends with `data`; None if it is too long."""
        if not data:
            raise RemoteProtocolError("an item without a byte")
        kept = self._parted.pop(stream, None)
        if kept is None:
            return data if len(data) <= self._item_bytes_max else None
        self.parted_bytes -= len(kept)
        kept += data
        return bytes(kept) if len(kept) <= self._item_bytes_max else None

    def _keep(self, stream: int, data: bytes) -> bool:
        """Keep a part; False if its item is too long."""
        kept = self._parted.setdefault(stream, bytearray())
        if not data or len(self._parted) > _PARTED_MAX:
            raise RemoteProtocolError(
                f"a part of {len(data)} bytes, with {len(self._parted)} items in parts"
            )
        kept += data
        self.parted_bytes += len(data)
        return len(kept) <= self._item_bytes_max
