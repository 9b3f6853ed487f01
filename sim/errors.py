"""How a simulated run can fail on its own account, apart from what the code in it raises."""

from __future__ import annotations

import sys

from trinamo.runtime.logs.text import leaves
from trinamo.runtime.nurseries import single


class SimulationError(Exception):
    """The root of the simulator's own findings."""


class Deadlock(SimulationError):  # noqa: N818 -- the field's word
    """Nothing can run and nothing is going to happen; the text says what each task waits for."""


class StepLimit(SimulationError):  # noqa: N818 -- as above
    """The run took more task steps than it was allowed: something spins."""


class Livelock(SimulationError):  # noqa: N818 -- as above
    """Tasks took step after step while the clock stood still; the text says which, and where they are."""


class TimeLimit(SimulationError):  # noqa: N818 -- as above
    """The run reached its virtual end; the text says what each task waits for."""


class UnsupportedTrio(SimulationError):  # noqa: N818 -- as above
    """This release of trio moved something the simulator relies on; the text says what."""


class Violation(AssertionError):  # noqa: N818 -- the field's word
    """The simulated system broke a rule. `invariant` names it, `text` says how.

    Raised by a scenario or its checkers; runs that broke the same rule count as one failure.
    """

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant, self.text = invariant, text

    def __reduce__(self) -> tuple[type[Violation], tuple[str, str]]:
        return Violation, (self.invariant, self.text)


class Escape(BaseException):
    """Simulated code reached for the real world: time, dice, threads, sockets, names, processes.

    Not an `Exception`, so that no handler in the simulated code takes it for a fault of the
    network. The text says which call it was, where it was made, and what to do instead.
    """


class EndlessStep(BaseException):
    """A task took one step for too long, in time of the processor: it spins without a checkpoint.

    Not an `Exception`, so that no handler in the loop that spins keeps it. The text says which task
    it was, where it was, and what to do instead.
    """


def fails_run(error: BaseException) -> bool:
    """Whether this fails the run of whose code it leaves; else it is trio's to handle, as cancellation is.

    asyncio's own cancellation is a failure: by then trio-asyncio has made trio's of what trio cancelled.
    """
    aio = sys.modules.get("asyncio")
    return isinstance(error, (Exception, SystemExit, Escape, EndlessStep)) or (
        aio is not None and isinstance(error, aio.CancelledError)
    )


def parted(error: BaseException) -> tuple[BaseException | None, BaseException | None]:
    """What of an error or group fails the run, and what (such as cancellation) is trio's to handle."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(fails_run)
    return (error, None) if fails_run(error) else (None, error)


def standing_for(error: BaseException) -> BaseException:
    """The one error that stands for a group: a broken rule before whatever else was raised with it."""
    chosen = single(error)
    if isinstance(chosen, Exception):
        return next((each for each in leaves(error) if isinstance(each, Violation)), chosen)
    return chosen
