"""What code sees that reads the machine's clocks and dice for itself during a run.

Our own code must not: it takes time and dice from its environment, and reading them raises `Escape`.
Libraries do (prometheus-client stamps its metrics, hypercorn its headers), and get the virtual clock
and dice of the run. Who is calling is read off the stack: the first frame outside the standard
library; what was installed among the site packages is a library. With `ambient="virtual"` everybody
is treated like one.

Names bound early (`from time import monotonic`) are replaced in every loaded module that holds one.
What still escapes: clocks and dice kept in closures, defaults or attributes before the run, and
`datetime.now()` and other C code; a lint rule (`tests/sim/isolation/test_lint.py`) keeps those out
of what is simulated. Read next: `guard.py`, which puts these stand-ins in place.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any, Literal

from .escapes import STDLIB, is_installed, is_stdlib

Ambient = Literal["raise", "virtual"]
Patch = tuple[Any, str, Any]
Refuse = Callable[[str], Callable[..., Any]]

CLOCKS = ("time", "monotonic", "perf_counter")
# What measures the machine, or formats its clock when no time is given.
REFUSED_CLOCKS = ("process_time", "process_time_ns", "thread_time", "thread_time_ns")
FORMATTERS = {"localtime": 0, "gmtime": 0, "ctime": 0, "asctime": 0, "strftime": 1}
DICE = tuple(
    name
    for name in random.__all__
    if isinstance(getattr(getattr(random, name), "__self__", None), random.Random)
    and name not in {"seed", "getstate", "setstate"}
)
# Their early-bound clocks are not used in a run, or are the simulator's own.
LEFT_ALONE = ("trio", "pytest", "_pytest", "hypothesis", "coverage")


def is_library_calling(frame: FrameType | None) -> bool:
    """Whether the first frame outside the standard library, from here out, is a library's."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and not is_stdlib(frame):
            return not name.startswith("trinamo.") and is_installed(frame)
        frame = frame.f_back
    return False


def stand_ins(
    ambient: Ambient,
    *,
    wall: Callable[[], float],
    now: Callable[[], float],
    rng: random.Random,
    refuse: Refuse,
) -> list[Patch]:
    """Everything to be replaced: whose attribute, which, by what."""

    def for_libraries(what: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        if ambient == "virtual":
            return answer
        refused = refuse(what)

        def stand_in(*args: Any, **keywords: Any) -> Any:
            call = answer if is_library_calling(sys._getframe(1)) else refused  # noqa: SLF001
            return call(*args, **keywords)

        return stand_in

    patches: list[Patch] = []
    for name in CLOCKS:
        read = wall if name == "time" else now
        patches += [
            (time, name, for_libraries(f"time.{name}", read)),
            (time, f"{name}_ns", for_libraries(f"time.{name}_ns", _in_ns(read))),
        ]
    by_number = _clock_gettime(wall, now)
    patches += [
        (time, "clock_gettime", for_libraries("time.clock_gettime", by_number)),
        (time, "clock_gettime_ns", for_libraries("time.clock_gettime_ns", _in_ns(by_number))),
    ]
    patches += [(time, name, refuse(f"time.{name}")) for name in REFUSED_CLOCKS]
    for name, index in FORMATTERS.items():
        refused = for_libraries(f"time.{name} without a time", _formatted(name, wall))
        patches.append((time, name, _only_given(getattr(time, name), index, refused)))
    for name in DICE:
        # The generator behind them is seeded for the run.
        patches.append((random, name, for_libraries(f"random.{name}", getattr(random, name))))
    patches += [
        (os, "urandom", for_libraries("os.urandom", rng.randbytes)),
        (
            os,
            "getrandom",
            for_libraries("os.getrandom", lambda size, _flags=0: rng.randbytes(size)),
        ),
        (random, "_urandom", for_libraries("random.SystemRandom or secrets", rng.randbytes)),
    ]
    by_real = {id(getattr(owner, name)): stand_in for owner, name, stand_in in patches}
    patches += [(module, name, by_real[key]) for module, name, key in _early_bound(by_real)]
    patches.append((logging, "time", _LogTime(wall)))
    return patches


def _in_ns(read: Callable[..., float]) -> Callable[..., int]:
    return lambda *args: int(read(*args) * 1e9)


def _clock_gettime(wall: Callable[[], float], now: Callable[[], float]) -> Callable[[int], float]:
    return lambda clock: wall() if clock == time.CLOCK_REALTIME else now()


def _formatted(name: str, wall: Callable[[], float]) -> Callable[..., Any]:
    real, as_struct = getattr(time, name), time.gmtime
    if name == "strftime":
        return lambda shape: real(shape, as_struct(wall()))
    return lambda: real(as_struct(wall()) if name == "asctime" else wall())


def _only_given(
    real: Callable[..., Any], index: int, without: Callable[..., Any]
) -> Callable[..., Any]:
    """`real` if it is told which time to convert; it would read the clock otherwise."""
    return lambda *args: (real if len(args) > index and args[index] is not None else without)(*args)


_sites: list[tuple[ModuleType, str, int]] = []
_seen: dict[str, ModuleType] = {}


def _early_bound(by_real: dict[int, Any]) -> Iterator[tuple[ModuleType, str, int]]:
    """The names in loaded modules that hold one of these clocks and dice themselves."""
    # Modules are only looked at once: there are thousands, and runs by the thousand.
    if len(_seen) != len(sys.modules):
        for name in [name for name in _seen if name not in sys.modules]:
            del _seen[name]
        for name, module in list(sys.modules.items()):
            if _seen.get(name) is module:
                continue
            _seen[name] = module
            top = name.partition(".")[0]
            if type(module) is ModuleType and top not in STDLIB and top not in LEFT_ALONE:
                _sites.extend(
                    (module, attribute, id(value))
                    for attribute, value in list(vars(module).items())
                    if id(value) in by_real
                )
    for module, attribute, key in _sites:
        if id(getattr(module, attribute, None)) == key:
            yield module, attribute, key


def unbind(stand_ins_to_real: dict[int, Any]) -> None:
    """Give modules that were first imported during the run the real names back.

    One that bound a stand-in early would otherwise keep it, and reach a run that is over.
    """
    if len(_seen) == len(sys.modules):
        return
    for name, module in list(sys.modules.items()):
        if _seen.get(name) is not module and type(module) is ModuleType:
            for attribute, value in list(vars(module).items()):
                if id(value) in stand_ins_to_real:
                    setattr(module, attribute, stand_ins_to_real[id(value)])


class _LogTime(SimpleNamespace):
    """What `logging` finds under its global name `time`."""

    def __init__(self, wall: Callable[[], float]) -> None:
        super().__init__(time=wall, time_ns=_in_ns(wall))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
