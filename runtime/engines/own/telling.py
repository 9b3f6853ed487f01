"""What an engine has raised, in a few words for its operator."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from typing import Final

from ...logs.text import name_error

_HERE: Final = Path(__file__).resolve().parent
_INSTALLED: Final = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


def told(error: BaseException) -> str:
    """An error of a program in a few words: its type, its text, and where it was raised."""
    text = name_error(error)
    if isinstance(error, SyntaxError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    called = [
        each
        for each in frames
        if not each.filename.startswith("<") and Path(each.filename).resolve().parent != _HERE
    ]
    if not called:
        return text
    # What it calls, asyncio say, has mistakes of its own far less often.
    own = [each for each in called if not each.filename.startswith(_INSTALLED)]
    place = (own or called)[-1]
    return f"{text} ({Path(place.filename).name}:{place.lineno}, in {place.name})"
