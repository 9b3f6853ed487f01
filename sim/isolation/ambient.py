"""What code sees that reads the machine's clocks and dice for itself during a run.

Everybody gets the virtual clock and dice of the run. With `ambient="raise"` only libraries do
(prometheus-client stamps its metrics, hypercorn its headers), and one's own code, which is to take
time and dice from its environment, gets an `Escape`. Who is calling is then read off the stack: the
first frame outside the standard library; what was installed among the site packages is a library.

Names bound early (`from time import monotonic`, `from os import fsync`) are replaced in every loaded module that
holds one, and `datetime.now` in the type itself. A module that is first imported during a run has dice of its
own, of its name, so the run's are the same if it was imported before. What still escapes: clocks and
dice kept in closures, defaults or attributes before the run, and the clocks of other C code, such as
numpy's; a lint rule (`tests/sim/isolation/test_lint.py`) keeps those out of what is simulated.
Read next: `guard.py`, which puts these stand-ins in place.
"""

from __future__ import annotations

import gc
import importlib._bootstrap as importing
import logging
import os
import random
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, tzinfo
from functools import cache
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any, Literal

from .escapes import is_installed, is_stdlib

Ambient = Literal["raise", "virtual"]
Patch = tuple[Any, str, Any]
Refuse = Callable[[str], Callable[..., Any]]

CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
FORMATTERS = {"localtime": 0, "gmtime": 0, "ctime": 0, "asctime": 0, "strftime": 1}
DICE = tuple(
    name
    for name in random.__all__
    if isinstance(getattr(getattr(random, name), "__self__", None), random.Random)
    and name not in {"seed", "getstate", "setstate"}
)
# Their early-bound clocks are not used in a run, are the simulator's own, or those of threads older than it.
LEFT_ALONE = (
    "trio",
    "pytest",
    "_pytest",
    "hypothesis",
    "coverage",
    "threading",
    "queue",
    "subprocess",
)


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

    def by_number(clock: int) -> float:
        return wall() if clock == time.CLOCK_REALTIME else now()

    patches += [
        (time, "clock_gettime", for_libraries("time.clock_gettime", by_number)),
        (time, "clock_gettime_ns", for_libraries("time.clock_gettime_ns", _in_ns(by_number))),
    ]
    for name, index in FORMATTERS.items():
        refused = for_libraries(f"time.{name} without a time", _formatted(name, wall))
        patches.append((time, name, _only_given(getattr(time, name), index, refused)))
    for name in DICE:
        # The generator behind them is seeded for the run.
        patches.append((random, name, for_libraries(f"random.{name}", getattr(random, name))))
    seed = _seeded(rng, for_libraries("random.Random without a seed", rng.getrandbits))
    patches += [
        (random.Random, "seed", seed),
        (random, "seed", seed.__get__(getattr(random.seed, "__self__", None))),
        (os, "urandom", for_libraries("os.urandom", rng.randbytes)),
        (os, "getrandom", for_libraries("os.getrandom", lambda n, _flags=0: rng.randbytes(n))),
        (random, "_urandom", for_libraries("random.SystemRandom or secrets", rng.randbytes)),
    ]
    patches += [
        (importing, "_find_and_load", _with_dice_of_its_own(rng)),
        *_dates(wall, for_libraries),
        *_uuids(rng, refuse if ambient == "raise" else None),
    ]
    if ambient == "raise":
        patches.append((logging, "time", _LogTime(wall)))
    return patches


@contextmanager
def in_utc() -> Iterator[None]:
    """Have local time be UTC: the zone of the machine would make it another run."""
    before = os.environ.get("TZ")
    os.putenv("TZ", "UTC")
    time.tzset()
    try:
        yield
    finally:
        os.unsetenv("TZ") if before is None else os.putenv("TZ", before)
        time.tzset()


def _seeded(rng: random.Random, drawn: Callable[[int], int]) -> Any:
    """`Random.seed` that draws from the run where it would ask the machine."""
    real = random.Random.seed

    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        # The run's own generator is given its seeds.
        real(self, drawn(256) if a is None and self is not rng else a, version)

    return seed


def _with_dice_of_its_own(rng: random.Random) -> Callable[..., Any]:
    """Python's search for a module that is not loaded; what it draws is the same in every run."""
    real: Callable[..., Any] = vars(importing)["_find_and_load"]

    def find_and_load(name: str, import_: Any) -> Any:
        before = random.getstate(), rng.getstate()
        random.seed(f"import/{name}")
        rng.seed(f"import/{name}/ambient")
        try:
            return real(name, import_)
        finally:
            random.setstate(before[0])
            rng.setstate(before[1])

    return find_and_load


class _NamesOfType:
    """The attributes of a type written in C, which Python code may not set, as those of an object."""

    def __init__(self, kind: type) -> None:
        import ctypes  # noqa: PLC0415 -- a tenth of the simulator's import

        names: dict[str, Any] = gc.get_referents(kind.__dict__)[0]
        changed = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyType_Modified", ctypes.pythonapi))
        vars(self).update(_kind=kind, _names=names, _is_changed=changed)

    def __getattr__(self, name: str) -> Any:
        return self._names[name]

    def __setattr__(self, name: str, value: object) -> None:
        self._names[name] = value
        self._is_changed(self._kind)


@cache
def names_of_datetime() -> Any:
    """`datetime.datetime` as an object whose methods can be replaced."""
    return _NamesOfType(datetime)


def _dates(
    wall: Callable[[], float],
    for_libraries: Callable[[str, Callable[..., Any]], Callable[..., Any]],
) -> list[Patch]:
    """The two calls of the type that ask the machine in C; `today` asks the module `time`."""

    def now(cls: type[datetime], tz: tzinfo | None = None) -> datetime:
        return cls.fromtimestamp(wall(), tz)

    def utcnow(cls: type[datetime]) -> datetime:
        return cls.fromtimestamp(wall(), UTC).replace(tzinfo=None)

    kind = names_of_datetime()
    return [
        (kind, "now", classmethod(for_libraries("datetime.now", now))),
        (kind, "utcnow", classmethod(for_libraries("datetime.utcnow", utcnow))),
    ]


def _uuids(rng: random.Random, refuse: Refuse | None) -> list[Patch]:
    """`uuid1` asks for the address of a network card, and a library in C for the time."""
    if refuse is not None:
        return [(uuid, "uuid1", refuse("uuid.uuid1"))]
    names = {"_generate_time_safe": None, "_UuidCreate": None, "_last_timestamp": None}
    return [(uuid, "_node", rng.getrandbits(48)), *((uuid, *each) for each in names.items())]


def _in_ns(read: Callable[..., float]) -> Callable[..., int]:
    return lambda *args: int(read(*args) * 1e9)


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


def early_bound(patches: list[Patch]) -> Iterator[Patch]:
    """The names in loaded modules that hold one of the replaced functions themselves, and its stand-in."""
    by_real: dict[int, Any] = {}
    for owner, name, stand_in in patches:
        real = getattr(owner, name, None)
        if callable(real):
            by_real.setdefault(id(real), stand_in)
    # Modules are only looked at once: there are thousands, and runs by the thousand.
    if len(_seen) != len(sys.modules):
        owned = {(id(owner), name) for owner, name, _ in patches}
        for name in [name for name in _seen if name not in sys.modules]:
            del _seen[name]
        for name, module in list(sys.modules.items()):
            if _seen.get(name) is module:
                continue
            _seen[name] = module
            top = name.partition(".")[0]
            if type(module) is ModuleType and top not in LEFT_ALONE:
                _sites.extend(
                    (module, attribute, id(value))
                    for attribute, value in list(vars(module).items())
                    if id(value) in by_real and (id(module), attribute) not in owned
                )
    for module, attribute, key in _sites:
        if id(getattr(module, attribute, None)) == key and key in by_real:
            yield module, attribute, by_real[key]


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
