"""What an `Escape` says: which call it was, where it was made, and what to do instead.

What this module does not do: notice the call. Read next: `guard.py` and `ambient.py`, which do.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

from ..errors import Escape

STDLIB = sys.stdlib_module_names - {"__main__"}
LIBRARY_FOLDERS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
FRAMES_MAX = 4
HERE = f"{Path(__file__).parent}{os.sep}"

_AMBIENT = (
    "take time and dice from the environment (trio.current_time(), a random.Random that is given),"
    " or make the world with ambient='virtual'"
)
_PROCESS = (
    "a world has no other programs: boot a host that plays the other process (world.boot), and give"
    " the code the function that starts it, so that the run can give it another"
)
_THREAD = (
    "trio.to_thread.run_sync is simulated, and a task of a nursery does as well; a library that"
    " brings its own threads, as grpcio does, needs a stand-in"
)
_SOCKET = (
    "make Network(world) before the run; then trio's streams and sockets reach the hosts of the"
    " world by name, and a real address is what nobody in it has"
)
ADVICE = {
    "time.sleep": "it would stop every host: await trio.sleep(), or sleep in trio.to_thread.run_sync",
    "time.": _AMBIENT,
    "datetime": _AMBIENT,
    "random.": _AMBIENT,
    "os.urandom": _AMBIENT,
    "os.getrandom": _AMBIENT,
    "uuid.": _AMBIENT,
    "threading.Condition.wait": (
        "a function in a thread runs while nobody else does, so what it waits for never comes:"
        " wait in a task, by trio.from_thread.run if need be"
    ),
    "threading.": _THREAD,
    "_thread.": _THREAD,
    "subprocess.": _PROCESS,
    "os.": _PROCESS,
    "trio.run_process": _PROCESS,
    "trio.lowlevel.open_process": _PROCESS,
    "socket.": _SOCKET,
}
"""What to do instead, by how the call's name begins; the first that fits."""


def escape_of(what: str, how: str = "the simulated code called ") -> Escape:
    """The `Escape` for the call `what`, made by the frames outside these folders."""
    advice = next((text for start, text in ADVICE.items() if what.startswith(start)), "")
    instead = f"\n  instead: {advice}" if advice else ""
    return Escape(f"{how}{what}{call_site(sys._getframe(1))}{instead}")  # noqa: SLF001


def call_site(frame: FrameType | None) -> str:
    """The innermost frames outside these folders, and the innermost that is nobody's library."""
    shown, places, has_own = "", 0, False
    while frame is not None and (places < FRAMES_MAX or not has_own):
        if frame.f_globals.get("__name__") == "trio._core._run":
            break  # What took the step; a task's own frames are over.
        code = frame.f_code
        if not code.co_filename.startswith(HERE):
            is_own = not (is_stdlib(frame) or is_installed(frame))
            if places < FRAMES_MAX or is_own:
                shown += f"\n  {code.co_filename}:{frame.f_lineno} in {code.co_name}"
            places, has_own = places + 1, has_own or is_own
        frame = frame.f_back
    return shown


def is_stdlib(frame: FrameType) -> bool:
    """Whether this is code of Python's own modules."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in STDLIB


def is_installed(frame: FrameType) -> bool:
    """Whether this is code of a package among the installed ones."""
    return any(folder in frame.f_code.co_filename for folder in LIBRARY_FOLDERS)
