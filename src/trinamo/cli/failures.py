"""From exceptions to one sentence on standard error and an exit code.

Whatever the tree of `runtime/errors.py` can raise ends here, alone or inside exception groups; a
traceback is shown for bugs, and for everything once `log.level` is `debug`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Final

from trinamo.runtime.logs.text import leaves, one_line, tell_traceback

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_CONFIG: Final = 2
EXIT_DEGRADED: Final = 3
"""`trinamo status`: a cluster runs, and something of it does not answer."""
EXIT_HURRIED: Final = 130
"""What shells expect of a process that Ctrl-C ended."""

_tracebacks = False


def show_tracebacks(wanted: bool) -> None:
    """Whether `report` shows where an error came from; set once the log level is known."""
    global _tracebacks
    _tracebacks = wanted


def report(error: BaseException) -> int:
    """Say what went wrong on standard error; returns the exit code."""
    from trinamo.runtime.errors import ConfigError, TrinamoError, extra_wanted

    found = list(leaves(error))
    wanted = extra_wanted(found[0])
    if wanted is not None and not _tracebacks:
        sys.stderr.write(f"trinamo: {wanted}\n")
        return EXIT_CONFIG
    expected = [each for each in found if isinstance(each, (TrinamoError, OSError))]
    if _tracebacks or len(expected) < len(found):
        sys.stderr.write(f"{tell_traceback(error)}\n")
    for each in expected[:1]:
        text = str(each)
        if isinstance(each, OSError) and each.filename is not None and each.strerror:
            # Python puts a number before it, which says nothing to a reader.
            text = f"{each.filename}: {each.strerror}"
        # The line ends are ours, and other controls may be a stranger's.
        said = "\n".join(map(one_line, text.splitlines() or [type(each).__name__]))
        sys.stderr.write(f"trinamo: {said}\n")
    return EXIT_CONFIG if any(isinstance(e, ConfigError) for e in expected) else EXIT_FAILED


def exit_code_of(error: BaseException) -> int | None:
    """The code of a `SystemExit`, also inside a group; None if there is none."""
    for each in leaves(error):
        if isinstance(each, SystemExit):
            code = each.code
            return code if isinstance(code, int) else EXIT_OK if code is None else EXIT_FAILED
    return None


def guarded(command: Callable[[], object]) -> int:
    """Run `command` to its end and return the exit code; only bugs show a traceback."""
    try:
        command()
    except BrokenPipeError:
        # The reader of our output has gone, as in `trinamo status | head`; what the interpreter
        # would still flush at its exit has nowhere to go either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except BaseException as error:  # noqa: BLE001 -- the last stop before the interpreter
        code = exit_code_of(error)
        if code is not None:
            return code
        if any(isinstance(each, KeyboardInterrupt) for each in leaves(error)):
            return EXIT_HURRIED
        return report(error)
    return EXIT_OK
