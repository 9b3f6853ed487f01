"""What a program's script says of itself: a line of JSON for each thing that it tried.

The scripts run in environments of their own, where nothing of trinamo is installed; they are told
by variables whom to ask.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = str(Path(__file__).parent)
SERVER = os.environ.get("CLIENTS_SERVER", "")
"""The address, without a path."""
BASE = f"{SERVER}/v1"
MODEL = os.environ.get("CLIENTS_MODEL", "")
KEY = "any"
LONG = "word " * 6000
"""A prompt that no context of the shipped model holds."""
SHORT = [{"role": "user", "content": "Say hello."}]


@contextmanager
def tried(what: str) -> Iterator[None]:
    """Try something; what it raises is told, and the next thing is tried."""
    told: dict[str, str | float] = {"tried": what}
    began_at = time.perf_counter()
    try:
        yield
    except Exception as error:  # noqa: BLE001
        told["failed"] = describe(error)
    told["took_s"] = round(time.perf_counter() - began_at, 2)
    print(json.dumps(told), flush=True)


def describe(error: BaseException) -> str:
    """The error in a line, with the line of the script that it came from."""
    trace, lines = error.__traceback__, []
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(HERE):
            lines.append(str(trace.tb_lineno))
        trace = trace.tb_next
    said = " ".join(str(error).split())
    return f"line {lines[-1] if lines else '?'}: {type(error).__name__}: {said[:600]}"


def must_raise(kind: type[Exception], call, *arguments, **named):
    """The error that the call has to raise, of this very kind or a kind of it."""
    try:
        found = call(*arguments, **named)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} but {found!r}"[:300])
