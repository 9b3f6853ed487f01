"""The orderly end of a process: each step with its deadline from `config.shutdown` and a log line.

`Runtime.shutdown` runs it, `runtime.py` says what is closed afterwards. A step that fails or takes
too long is told and does not stop the ones that follow.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import trio

from ..errors import TrinamoError

if TYPE_CHECKING:
    from ..worker.worker import Worker
    from .runtime import Runtime

__all__ = ["shut_down"]

_log = logging.getLogger("trinamo.runtime")


async def shut_down(runtime: Runtime, worker: Worker) -> None:
    """Leave discovery, refuse, drain, stop, kill, let transfers end, revoke the lease.

    Cancelled, it leaves the rest undone: what the control plane still holds dies with the lease.
    """
    limits = runtime.config.shutdown
    await _step("leave discovery", limits.leave_timeout_s, runtime.leave_discovery)
    worker.refuse_new()
    runtime.env.note("drain.begin", active=worker.active_count)
    _log.info("shutdown: new requests are refused; %d in flight", worker.active_count)
    if not await _step("drain", limits.drain_timeout_s, worker.wait_idle):
        worker.stop_all()
        if not await _step("stop", limits.stop_timeout_s, worker.wait_idle):
            worker.kill_all()
            await _step("kill", limits.kill_timeout_s, worker.wait_idle)
    runtime.env.note("drain.end", active=worker.active_count)
    if runtime.transfers is not None:
        # The lease comes after: a peer that still moves our blocks must not take us for dead.
        await _step("drain transfers", limits.transfer_timeout_s, runtime.transfers.drain)
    await _step("revoke the lease", limits.revoke_timeout_s, runtime.registrar.revoke)


async def _step(name: str, timeout_s: float, step: Callable[[], Awaitable[None]]) -> bool:
    started_at = trio.current_time()
    try:
        with trio.fail_after(timeout_s):
            await step()
    except trio.TooSlowError:
        _log.warning("shutdown: %s did not finish within %g s", name, timeout_s)
        return False
    except TrinamoError as error:
        _log.warning("shutdown: %s failed: %s", name, error)
        return False
    except Exception:  # noqa: BLE001 -- a bug in one step must not keep the lease from being revoked
        _log.exception("shutdown: %s failed", name)
        return False
    _log.info("shutdown: %s took %.3f s", name, trio.current_time() - started_at)
    return True
