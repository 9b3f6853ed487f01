"""From token bytes to text: whole characters only, nothing of a stop string, any split the same.

Sans-IO and shared by all engines. `TextStream` puts the two parts in a row: an incremental UTF-8
decoder, which keeps an incomplete character back, and `StopMatcher`, which keeps back what may be
the beginning of a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache


class StopMatcher:
    """Lets text through up to the stop string that is complete first.

    Of several that end with the same character, the longest one counts. One Knuth-Morris-Pratt
    automaton a stop string walks over the characters, so the result does not depend on how the
    text was cut, and a character costs O(stop strings) however long they are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._borders = _automata(tuple(stops)) if stops else ((), ())
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.stopped_by = ""
        """The stop string that is complete."""

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string is complete: no text follows."""
        return bool(self.stopped_by)

    @property
    def held(self) -> str:
        """The text kept back: the longest end of the input that begins a stop string."""
        return self._held

    def push(self, text: str) -> str:
        """Take more text in and return what may be shown; nothing more once `is_stopped`."""
        if not self._stops:
            return text
        if self.stopped_by:
            return ""
        pending = self._held + text
        for index in range(len(self._held), len(pending)):
            self.stopped_by = self._advance(pending[index])
            if self.stopped_by:
                self._held = ""
                return pending[: index + 1 - len(self.stopped_by)]
        keep = len(pending) - max(self._matched)
        self._held = pending[keep:]
        return pending[:keep]

    def flush(self) -> str:
        """The text is over: return what was kept back."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str:
        """Feed one character to every automaton; the stop that it completes, or nothing."""
        complete = ""
        for number, stop in enumerate(self._stops):
            matched = self._matched[number]
            borders = self._borders[number]
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            if stop[matched] == char:
                matched += 1
            self._matched[number] = matched
            if matched == len(stop):
                complete = complete or stop
                # A complete automaton is never advanced again: the matcher has stopped.
        return complete


# The choices of one request have the same strings: what they cost is paid once, not for each choice.
@lru_cache(maxsize=32)
def _automata(stops: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[list[int], ...]]:
    """The strings, longest first, and the borders of each."""
    # So the first automaton to accept is the longest of a tie.
    ordered = tuple(sorted(set(stops), key=len, reverse=True))
    if not all(ordered):
        raise ValueError("a stop string must not be empty")
    return ordered, tuple(map(_borders, ordered))


def _borders(pattern: str) -> list[int]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index] = length
    return borders


class TextStream:
    """The text of one answer, from the bytes of its tokens."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_partial = False
        """Whether the decoder keeps an incomplete character back."""
        self._matcher = StopMatcher(stops)

    @property
    def stopped_by(self) -> str:
        """The stop string that is complete: no text follows; else empty."""
        return self._matcher.stopped_by

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string is complete."""
        return bool(self._matcher.stopped_by)

    def push(self, data: bytes) -> str:
        """Take the bytes of one token and return the text that can be shown now.

        Bytes that are no UTF-8 become U+FFFD.
        """
        if data.isascii() and not self._is_partial:
            text = data.decode("ascii")
        else:
            text = self._decoder.decode(data)
            self._is_partial = bool(self._decoder.getstate()[0])
        return self._matcher.push(text)

    def finish(self) -> str:
        """The answer is over: return what was kept back, empty after a stop string."""
        if self.is_stopped:
            return ""
        shown = self._matcher.push(self._decoder.decode(b"", final=True))
        return shown + self._matcher.flush()
