"""Versions of the protocol that processes of one cluster speak with each other, and which of them fit.

A version is `major.minor`. Two processes fit if both speak one major; of that, the lesser minor is what
both know. What a newer minor adds, a field or a frame, is skipped by who does not know it; what may not
be skipped is a new major. A process tells the newest that it speaks in the greeting of each connection, and all
in what it registers, with its build for people to read; whoever reads an entry that does not fit refuses it
there, so that nobody lists or asks its owner. An entry that tells none is older than 3.0.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.metadata import version
from typing import Final, NamedTuple

import msgspec

from ..errors import RemoteProtocolError
from .undecodable import Unsigned, check_signed, decoded


class Version(NamedTuple):
    """`major.minor`."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


SPOKEN: Final = (Version(3, 0),)
"""Of each major that this build speaks, the newest minor; the newest major last."""
BUILD: Final = version("trinamo")
"""Told for people, and compared by nobody."""
_TOLD_MAX: Final = 16
_BUILD_CHARACTERS_MAX: Final = 32
_TEXT: Final = re.compile(r"(0|[1-9][0-9]{0,4})\.(0|[1-9][0-9]{0,4})")


class _Told(msgspec.Struct, frozen=True):
    """What every entry tells beside what it is for."""

    protocol: list[str] = []
    build: str = ""


_OURS: Final = msgspec.json.encode(_Told(list(map(str, SPOKEN)), BUILD))
_decoder = msgspec.json.Decoder(_Told)


def encode_entry(entry: msgspec.Struct) -> bytes:
    """The value to register, by the process that it is of: it tells what we speak."""
    return msgspec.json.encode(entry)[:-1] + b"," + _OURS[1:]


def check_versions(what: str, entry: bytes) -> None:
    """Refuse an entry that no member signed, or whose owner speaks no version that is spoken here.

    The `RemoteProtocolError` begins with `what`, and says what is wrong with the signature, or what both
    speak and which of them is to be upgraded.
    """
    # An older build signs nothing, and is told apart from a stranger by what it says.
    said = entry.said if isinstance(entry, Unsigned) else entry
    told = decoded(_decoder.decode, said, f"{what}: it tells no versions")
    spoken = tuple(told.protocol[:_TOLD_MAX])
    if common_version(spoken) is not None:
        check_signed(what, entry)
        return
    newest = max((each for each in map(_parsed, spoken) if each is not None), default=Version(0, 0))
    which = "it is to be upgraded" if newest < SPOKEN[-1] else "this one is to be upgraded"
    raise RemoteProtocolError(
        f"{what}: {f'build {told.build[:_BUILD_CHARACTERS_MAX]}' if told.build else 'an older build'} speaks protocol"
        f" {', '.join(spoken)[:80] or 'of before 3.0'}, and this build, {BUILD},"
        f" {', '.join(map(str, SPOKEN))}: {which}"
    )


def read_build(entry: bytes) -> str:
    """The build that an entry which was not refused tells, for people to read."""
    return _decoder.decode(entry).build[:_BUILD_CHARACTERS_MAX]


@lru_cache(maxsize=64)
def common_version(told: tuple[str, ...]) -> Version | None:
    """The newest version that who tells these speaks as well as this process; None if there is none."""
    ours = {each.major: each.minor for each in SPOKEN}
    return max(
        (
            Version(each.major, min(each.minor, ours[each.major]))
            for each in map(_parsed, told)
            if each is not None and each.major in ours
        ),
        default=None,
    )


def _parsed(text: str) -> Version | None:
    found = _TEXT.fullmatch(text)
    return Version(int(found[1]), int(found[2])) if found else None
