"""asyncio on trio-asyncio's loops during a run: a function of the seed, in an order that the seed gives.

A loop of trio-asyncio waits for trio's clock and the run's sockets already. Two things are left: tasks lie in
sets, by their addresses, and so are cancelled in any order; and those of one loop take their steps first
in, first out, so that whoever relies on that is never found out. Here a task's hash is its number in the run, and which of
the tasks that can go on is next is a decision called `asyncio`. Callbacks keep their order, which asyncio
promises.

asyncio is not imported here: only who loads trio-asyncio needs this.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import trio
from typing_extensions import override

from ..core.choices import Choices
from ..errors import UnsupportedTrio
from ..isolation.guard import replaced
from .names import Names

if TYPE_CHECKING:
    import asyncio  # noqa: TID251 -- for the types

STEPS = ("TaskStepMethWrapper", "task_wakeup", "_Task__step", "_Task__wakeup")
"""How a task's step is called in a loop's queue: in C, and in Python."""


def asyncio_in_place(network: Names, stack: ExitStack) -> None:
    """Stand in for what has to differ until `stack` is left: at once, or when trio-asyncio is loaded."""
    loaded = sys.modules.get("trio_asyncio")
    if loaded is not None:
        _replace(loaded, network, stack)
    else:
        finder = _Arrival(network, stack)
        sys.meta_path.insert(0, finder)
        stack.callback(finder.leave)


class _Arrival(MetaPathFinder):
    """Notices that trio-asyncio is imported."""

    def __init__(self, network: Names, stack: ExitStack) -> None:
        self._network, self._stack = network, stack

    def leave(self) -> None:
        """Notice nothing from now on."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "trio_asyncio":
            return None
        self.leave()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _replace(module, self._network, self._stack)

            vars(spec.loader)["exec_module"] = exec_module
        return spec


def _replace(trio_asyncio: Any, network: Names, stack: ExitStack) -> None:
    import asyncio  # noqa: PLC0415, TID251 -- loaded already

    async def getaddrinfo(_loop: Any, host: Any, port: Any, **how: Any) -> Any:
        return network.look_up(host, port, **how)

    async def getnameinfo(_loop: Any, address: Any, flags: int = 0) -> Any:
        return network.name_and_port(address, flags)

    task, future = _numbered()
    all_tasks = asyncio.all_tasks

    def all_tasks_in_order(loop: asyncio.AbstractEventLoop | None = None) -> set[Any]:
        """The tasks in a set filled by number: asyncio's own set of them is older than the run."""
        found = all_tasks(asyncio.get_running_loop() if loop is None else loop)
        # Their hash is their number. The order of filling shows where hashes collide.
        return set(sorted(found, key=lambda each: each.__hash__()))  # noqa: C414 -- a number

    loop_class = getattr(trio_asyncio, "TrioEventLoop", None)
    begin = getattr(loop_class, "_main_loop_init", None)
    if begin is None:
        raise _moved("TrioEventLoop._main_loop_init is gone")

    async def begin_in_order(loop: Any, nursery: trio.Nursery) -> None:
        await begin(loop, nursery)
        if not hasattr(loop, "_q_recv"):
            raise _moved("its loops have no _q_recv")
        loop._q_recv = _Queue(loop._q_recv, network.world.choices)  # noqa: SLF001 -- looked for just now

    patches = (
        (asyncio.tasks, "Task", task),
        (asyncio.tasks, "all_tasks", all_tasks_in_order),
        (asyncio, "all_tasks", all_tasks_in_order),
        (asyncio.BaseEventLoop, "create_future", lambda loop: future(loop=loop)),
        (asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo),
        (asyncio.BaseEventLoop, "getnameinfo", getnameinfo),
        (loop_class, "_main_loop_init", begin_in_order),
    )
    stack.enter_context(replaced(*patches))


def _numbered() -> tuple[type[asyncio.Task[Any]], type[asyncio.Future[Any]]]:
    """Classes of tasks and futures whose place in a set does not depend on where in memory they lie."""
    import asyncio  # noqa: PLC0415, TID251 -- as above

    numbers = itertools.count(1)

    class Task(asyncio.Task):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **how: Any) -> None:
            self._place = next(numbers)
            super().__init__(*args, **how)

        def __hash__(self) -> int:
            return self._place

    class Future(asyncio.Future):  # type: ignore[type-arg]
        def __init__(self, **how: Any) -> None:
            self._place = next(numbers)
            super().__init__(**how)

        def __hash__(self) -> int:
            return self._place

    return Task, Future


def _moved(what: str) -> UnsupportedTrio:
    import importlib.metadata  # noqa: PLC0415 -- it takes long to load

    return UnsupportedTrio(f"trio-asyncio {importlib.metadata.version('trio-asyncio')}: {what}")


class _Queue:
    """The handles of a loop, oldest first, of which tasks may go before older tasks."""

    def __init__(
        self, arriving: trio.MemoryReceiveChannel[asyncio.Handle], choices: Choices
    ) -> None:
        self._arriving, self._choices = arriving, choices
        self._handles: deque[asyncio.Handle] = deque()

    async def receive(self) -> asyncio.Handle:
        """The next handle; if the wait is cancelled, none is lost."""
        self._take_in()
        if self._handles:
            await trio.lowlevel.checkpoint()
        else:
            self._handles.append(await self._arriving.receive())
        return self.receive_nowait()

    def receive_nowait(self) -> asyncio.Handle:
        """The next handle, or `trio.WouldBlock`."""
        self._take_in()
        if not self._handles:
            raise trio.WouldBlock
        tasks = sum(1 for _ in itertools.takewhile(_is_step, self._handles))
        place = self._choices.below(tasks, "asyncio")
        handle = self._handles[place]
        del self._handles[place]
        return handle

    def _take_in(self) -> None:
        while self._arriving.statistics().current_buffer_used:
            self._handles.append(self._arriving.receive_nowait())


def _is_step(handle: Any) -> bool:
    callback = handle._callback  # noqa: SLF001 -- asyncio's own debugging reads it so
    name = getattr(callback, "__name__", None) or type(callback).__name__
    return name in STEPS
