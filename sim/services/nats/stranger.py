"""Somebody with the broker's token, and nothing else: he hears all, and says what he likes before others do.

He repeats, changes and moves requests, answers and jobs, answers in the place of whoever is asked, and says
that nobody is there. Where members seal what they say nobody notices, but for the notes that say so.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Final

import attrs

from ...core.world import World
from .wire import Publish, status

_REQUESTS: Final = "trinamo.requests."
_JOB: Final = re.compile(r"trinamo\.queue\.[\w-]+\.job\.\w+")
_HEARD_MAX: Final = 16
_NO: Final = b'{"id":"","status":"invalid"}'
Heard = deque[Publish]
Act = Callable[["Stranger", Publish, Heard], Publish]


class Stranger:
    """`says` is asked about each message before it is delivered. His acts are decisions of the run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._requests, self._answers, self._jobs = [Heard(maxlen=_HEARD_MAX) for _ in range(3)]

    def says(self, message: Publish) -> list[Publish]:
        """What he has to say first: two things, as each may take the other's effect away."""
        acts: tuple[Act, ...]
        if message.subject.startswith(_REQUESTS):
            heard, acts = self._requests, _ON_REQUESTS if message.reply else _ON_ALL
        elif any(each.reply == message.subject for each in self._requests):
            heard, acts = self._answers, _ON_ALL
        elif _JOB.fullmatch(message.subject):
            heard, acts = self._jobs, _ON_ALL
        else:
            return []
        heard.append(message)
        chosen = [self._world.choices.below(len(acts) + 1, "stranger") for _ in range(2)]
        said = [acts[each - 1](self, message, heard) for each in chosen if each]
        for each in said:
            self._world.note("stranger.said", subject=each.subject)
        return said

    def changed(self, message: Publish, _: Heard) -> Publish:
        """It, but for a bit."""
        payload = bytearray(message.payload or b"\0")
        payload[self._world.choices.below(len(payload), "changed byte")] ^= 1
        return attrs.evolve(message, payload=bytes(payload))

    def moved(self, message: Publish, heard: Heard) -> Publish:
        """Another one of its kind in its place, where there is one."""
        return attrs.evolve(message, payload=heard[0].payload)

    def repeated(self, message: Publish, heard: Heard) -> Publish:
        """An older one, where there is one, as it was."""
        return next(each for each in heard if each.subject == message.subject)

    def answered(self, message: Publish, _: Heard) -> Publish:
        """In the worker's place: no."""
        frame = len(_NO).to_bytes(4, "big") + bytes(4) + _NO
        return Publish(message.reply, frame)

    def denied(self, message: Publish, _: Heard) -> Publish:
        """In the broker's place: nobody is there."""
        return Publish(message.reply, head=status(503))


_ON_ALL: Final[tuple[Act, ...]] = (Stranger.changed, Stranger.moved, Stranger.repeated)
_ON_REQUESTS: Final[tuple[Act, ...]] = (*_ON_ALL, Stranger.answered, Stranger.denied)
