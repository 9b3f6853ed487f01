"""`make house`: the weight of the product, how finely it is cut, and what one request walks through.

Lines are of Python, blanks and docstrings included, without generated code. A walk is a real request
over TCP to a worker (engine `exact`, memory planes, one process), every function of ours counted by
`sys.setprofile`; its steps are those of trio's tasks, without the client's own.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath
from types import FrameType
from typing import Any

import attrs
import trio

from tests.house.test_rooms import circles, rooms
from tests.runtime.small_cluster import MODEL, open_small_cluster
from tests.sources import PACKAGES, ROOT, Source, all_sources, nodes_of, sources

Function = ast.FunctionDef | ast.AsyncFunctionDef
TOKENS = 9
"""Of the answer beside which that of one token shows what each further one takes."""
WARM_UP = 5
OURS = f"{ROOT / 'src' / 'trinamo'}/"
"""By this path the product is imported, whatever folder its links lead to."""


def nodes(*kinds: type[ast.AST]) -> Iterator[Any]:
    for source in all_sources():
        yield from (node for node in nodes_of(source.tree) if isinstance(node, kinds))


def lines_of(source: Source) -> int:
    return len(source.path.read_text("utf-8").splitlines())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def called_once() -> list[str]:
    """Private functions of runtime and transports that are named at one place besides their own."""
    defined: Counter[str] = Counter()
    named: Counter[str] = Counter()
    for source in (*sources("runtime"), *sources("transports")):
        for node in nodes_of(source.tree):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    defined[name] += is_private(name)
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    named[name] += 1
                case _:
                    pass
    return [name for name, count in defined.items() if count == 1 and named[name] == 1]


def two_meanings() -> list[str]:
    """Public classes of one name in several modules."""
    names = Counter(node.name for node in nodes(ast.ClassDef) if not is_private(node.name))
    return sorted(name for name, count in names.items() if count > 1)


def weights() -> Iterator[tuple[str, object]]:
    for package in PACKAGES:
        yield f"lines of {package}", f"{sum(map(lines_of, sources(package))):,}"
    yield "product lines", f"{sum(map(lines_of, all_sources())):,}"
    functions = [node.name for node in nodes(ast.FunctionDef, ast.AsyncFunctionDef)]
    private = sum(map(is_private, functions))
    yield "classes", f"{len(list(nodes(ast.ClassDef))):,}"
    yield "functions", f"{len(functions):,}"
    yield "private helpers among them", f"{private:,} ({private / len(functions):.0%})"
    yield "private helpers named once (runtime, transports)", len(called_once())
    yield "classes that share their name with another", len(two_meanings())
    glossary = (ROOT / "docs" / "glossary.md").read_text("utf-8")
    yield "terms in the glossary", len(re.findall(r"^\* \*\*", glossary, re.MULTILINE))
    yield "circles of rooms", len(circles(rooms()))


@attrs.define(eq=False)
class Walk(trio.abc.Instrument):
    """What runs between `begin` and `end`."""

    calls: list[tuple[str, str]] = attrs.field(factory=list)
    steps: int = 0
    _is_on: bool = False

    def begin(self) -> None:
        self._is_on = True
        sys.setprofile(self._called)

    def end(self) -> None:
        sys.setprofile(None)
        self._is_on = False

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps += self._is_on and not task.name.startswith("tests.")

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        # Libraries stand below the root, too, in the virtual environment.
        if event == "call" and code.co_filename.startswith(OURS):
            name = PurePath(code.co_filename).relative_to(ROOT / "src" / "trinamo").as_posix()
            self.calls.append((name, code.co_qualname))

    @property
    def functions(self) -> set[tuple[str, str]]:
        return set(self.calls)


def ask(port: int, tokens: int, is_streamed: bool = False, is_left: bool = False) -> None:
    """One chat over a connection of its own, without a library whose functions would count.

    Left, its connection is closed at the first that comes of the answer.
    """
    messages = [{"role": "user", "content": "one two three"}]
    wanted = {"model": MODEL, "messages": messages, "max_tokens": tokens, "stream": is_streamed}
    body = json.dumps(wanted).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(head.encode() + body)
        answer = b""
        while not (is_left and answer) and (data := client.recv(65536)):
            answer += data
    assert answer.startswith(b"HTTP/1.1 200"), answer


async def walked(port: int, *asked: Any, last: tuple[str, str] | None = None) -> Walk:
    """Return what `ask` runs, up to the first call of `last`, which may come after the answer."""
    walk = Walk()
    trio.lowlevel.add_instrument(walk)
    walk.begin()
    try:
        await trio.to_thread.run_sync(ask, port, *asked)
        await trio.sleep(0.05)
        with trio.move_on_after(120):
            while last is not None and last not in walk.calls:
                await trio.sleep(0.01)
    finally:
        walk.end()
        trio.lowlevel.remove_instrument(walk)
    return walk


async def walks() -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, workers, policy in (("a chat of one token", 1, "round_robin"), ("by kv", 2, "kv")):
        settings: dict[str, Any] = {"http__dashboard": False, "router__policy": policy}
        async with open_small_cluster(workers=workers, **settings) as cluster:
            port = cluster.http.base_url.port
            assert port is not None
            for _ in range(WARM_UP):
                await trio.to_thread.run_sync(ask, port, TOKENS)
            one, many = await walked(port, 1), await walked(port, TOKENS)
        files = {file for file, _ in one.functions}
        found.append((f"functions / files of {name}", f"{len(one.functions)} / {len(files)}"))
        found.append((f"calls / task steps of {name}", f"{len(one.calls)} / {one.steps}"))
        if workers == 1:
            sends = sum(name.endswith("Link._send") for _, name in one.calls)
            found.append(("sends on the stream link", sends))
            more = Counter(many.calls) - Counter(one.calls)
            each = {call for call, count in more.items() if count >= TOKENS - 1}
            files = {file for file, _ in each}
            found.append(("functions / files of one token more", f"{len(each)} / {len(files)}"))
    return found


def main() -> None:
    """Print all figures as a table."""
    parser = argparse.ArgumentParser(
        prog="make house", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--names", action="store_true", help="say which helpers, names and circles")
    chosen = parser.parse_args()
    for name, value in (*weights(), *trio.run(walks)):
        print(f"{name:<52} {value}")
    if chosen.names:
        print("\nhelpers named once:", *sorted(called_once()))
        print("\nclasses of one name:", *two_meanings())
        print(
            "\ncircles:", *(" <-> ".join(sorted(circle)) for circle in circles(rooms())), sep="\n"
        )


if __name__ == "__main__":
    main()
