"""The orderly end of a process: steps, each with its deadline and a line in the log.

Which they are is in `runtime.py`. A step that fails or takes too long is told, and does not stop the
ones that follow.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable

import attrs
import trio

from ..errors import TrinamoError

_log = logging.getLogger("trinamo.runtime")


@attrs.frozen
class Step:
    """What is done within `timeout_s`, or given up."""

    name: str
    timeout_s: float
    do: Callable[[], Awaitable[None]]


async def run_steps(steps: Iterable[Step]) -> None:
    """Do one after the other; what stands between them in a generator happens between them.

    Cancelled, it leaves the rest undone.
    """
    for step in steps:
        started_at = trio.current_time()
        try:
            with trio.fail_after(step.timeout_s):
                await step.do()
        except trio.TooSlowError:
            _log.warning("shutdown: %s did not finish within %g s", step.name, step.timeout_s)
        except TrinamoError as error:
            _log.warning("shutdown: %s failed: %s", step.name, error)
        except Exception:  # noqa: BLE001 -- a bug in one step must not keep the lease from being revoked
            _log.exception("shutdown: %s failed", step.name)
        else:
            _log.info("shutdown: %s took %.3f s", step.name, trio.current_time() - started_at)
