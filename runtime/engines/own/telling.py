"""What an engine has raised, in a few words for its operator."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).resolve().parent


def told(error: BaseException) -> str:
    """An error of a program in a few words: its type, its text, and where it was raised."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if not _is_ours(each.filename)]
    if not own:
        return text
    place = own[-1]
    return f"{text} ({Path(place.filename).name}:{place.lineno}, in {place.name})"


def _is_ours(file_name: str) -> bool:
    return file_name.startswith("<") or Path(file_name).resolve().parent == _HERE
