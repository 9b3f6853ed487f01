"""The house: rooms that a reader can look over, and no staircase that leads back to itself.

`docs/architecture.md` shows the tree. A room is a folder; its walls are these bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import pytest

from tests.sources import ROOT, all_sources, imports, is_generated, listed, other_files

FILES_MAX = 14
# The root of a package holds only what everything in it imports.
ROOT_FILES_MAX = 8
ROOTS = ("runtime", "transports", "sim", "src/trinamo/cli", "tests", "properties")


def python_files() -> list[str]:
    paths = [source.path for source in all_sources()] + list(other_files())
    return [path.relative_to(ROOT).as_posix() for path in paths if not is_generated(path)]


def test_no_room_holds_more_than_a_reader_looks_over() -> None:
    rooms = Counter(name.rpartition("/")[0] for name in python_files())
    full = [
        f"{room}: {count} files"
        for room, count in sorted(rooms.items())
        if count > (ROOT_FILES_MAX if room in ROOTS else FILES_MAX)
    ]

    assert not full, listed(full)


def rooms_shown(page: str) -> set[str]:
    """The folders of the tree in docs/architecture.md; two spaces make a step down."""
    tree = page.partition("## Three floors")[2].partition("```\n")[2].partition("```")[0]
    shown: set[str] = set()
    above: dict[int, str] = {}
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        for word in line.split():
            if not word.endswith("/"):
                if word.endswith(".py"):
                    continue
                break
            room = above.get(depth - 1, "") + word
            shown.add(room.rstrip("/"))
            above[depth] = room
    return shown


def test_the_tree_on_the_architecture_page_shows_every_room() -> None:
    rooms = {
        source.path.parent.relative_to(ROOT).as_posix()
        for source in all_sources()
        if not is_generated(source.path)
    }

    assert rooms_shown((ROOT / "docs" / "architecture.md").read_text("utf-8")) - {
        "src/trinamo"
    } == rooms - {"src/trinamo"}


def graph() -> dict[str, set[str]]:
    """Which module imports which, type-checking imports and those inside functions included."""
    modules = {source.module for source in all_sources()}
    found: dict[str, set[str]] = {}
    for source in all_sources():
        found[source.module] = set()
        for each in imports(source):
            target = each.target.removeprefix("trinamo.")
            while target and target not in modules:
                target = target.rpartition(".")[0]
            # Of `from . import wire_pb2`, a file that nobody wrote, the package itself is left.
            is_own_package = source.module.startswith(f"{target}.")
            if target not in ("", source.module) and not is_own_package:
                found[source.module].add(target)
    return found


def circles(edges: Mapping[str, set[str]]) -> list[frozenset[str]]:
    """Sets of modules each of which reaches all others of its set: what is left when every
    module that imports none of the rest, or that none of the rest imports, is taken away.
    """
    reach: dict[str, frozenset[str]] = {}
    for start in edges:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for target in edges[waiting.pop()] - seen:
                seen.add(target)
                waiting.append(target)
        reach[start] = frozenset(seen)
    found = {
        frozenset(other for other in reach[module] if module in reach[other])
        for module in edges
        if module in reach[module]
    }
    return sorted(found, key=sorted)


def rooms() -> dict[str, set[str]]:
    """The same by folder; of one that has folders in it, each file is a room of its own."""
    folders = {source.module for source in all_sources() if source.is_package}
    houses = {folder.rpartition(".")[0] for folder in folders}

    def room(module: str) -> str:
        folder = module if module in folders else module.rpartition(".")[0]
        return module if folder in houses else folder

    found: dict[str, set[str]] = {}
    for module, targets in graph().items():
        here = found.setdefault(room(module), set())
        here |= {room(target) for target in targets} - {room(module)}
    return found


@pytest.mark.parametrize("parts", [graph, rooms], ids=["files", "rooms"])
def test_no_imports_go_in_circles(parts: Callable[[], dict[str, set[str]]]) -> None:
    found = circles(parts())

    assert not found, listed(" <-> ".join(sorted(circle)) for circle in found)


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        ({"a": {"b"}, "b": set()}, []),
        ({"a": {"b"}, "b": {"a"}, "c": {"a"}}, [frozenset("ab")]),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}}, [frozenset("abc")]),
    ],
)
def test_a_planted_circle_is_found(
    edges: dict[str, set[str]], expected: list[frozenset[str]]
) -> None:
    assert circles(edges) == expected
