"""Engines by name: of a module, of a file; and the sentence for each that cannot be imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinamo import ConfigError
from trinamo.runtime.engines.own.loading import load_engine

ENGINE = """
import trinamo
from neighbour_of_engines import WORD

@trinamo.engine(name="found")
async def engine(request, context):
    yield WORD

async def plain(request, context):
    yield WORD

number = 4
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    Path("own_engines.py").write_text(ENGINE)
    Path("neighbour_of_engines.py").write_text("WORD = 'hello'\n")
    yield
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) in {
            str(path) for path in tmp_path.glob("*.py")
        }:
            del sys.modules[name]


@pytest.mark.parametrize(
    "name", ["own_engines:engine", "own_engines.py:engine", "./own_engines.py:engine"]
)
def test_a_module_and_a_file_have_engines(name: str) -> None:
    assert load_engine(name).name == "found"


def test_a_generator_need_not_be_decorated() -> None:
    assert load_engine("own_engines:plain").name == "plain"


def test_the_folder_comes_last_once_all_is_imported() -> None:
    load_engine("own_engines.py:engine")

    assert sys.path[-1] == str(Path.cwd())
    assert sys.path[0] != str(Path.cwd())


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import nothing_of_that_name", r"ModuleNotFoundError: .*\(broken.py:1"),
        ("def (", "SyntaxError: "),
        ("1 / 0", r"ZeroDivisionError: division by zero \(broken.py:1"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
@pytest.mark.parametrize("where", ["broken", "broken.py"])
def test_what_does_not_import_is_a_sentence(where: str, code: str, words: str) -> None:
    Path("broken.py").write_text(code)

    with pytest.raises(ConfigError, match=f"^engine {where}:e does not import: {words}"):
        load_engine(f"{where}:e")


KINDS = """
class Entered:
    async def __aenter__(self): ...
    async def __aexit__(self, *error): ...

class WithoutAnswer: ...

class AnswersOnce:
    async def answer(self, request, context): return "x"

class Answers:
    def __init__(self, *, times: int = 1): ...
    async def answer(self, request, context): yield "x"

async def coroutine(request, context): return "x"

def factory(*, size: int = 1): ...
"""


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("WithoutAnswer", {}, "engine WithoutAnswer is no async generator .* a class"),
        ("AnswersOnce", {}, "engine AnswersOnce is no async generator"),
        ("coroutine", {}, "write `async def answer.*with `yield` in it"),
        ("Answers", {"time": "2"}, "takes no argument 'time'; it takes times"),
        ("Answers", {"times": "two"}, "its argument times is `int`, not 'two'"),
        ("factory", {"size": "big"}, "its argument size is `int`"),
    ],
)
def test_what_can_be_no_engine_is_seen_without_opening_it(
    name: str, arguments: dict[str, str], words: str
) -> None:
    Path("kinds_of_engines.py").write_text(KINDS)

    with pytest.raises(ConfigError, match=words):
        load_engine(f"kinds_of_engines.py:{name}").check(arguments)


@pytest.mark.parametrize("name", ["Entered", "Answers", "factory"])
def test_what_may_be_an_engine_passes_the_look(name: str) -> None:
    Path("kinds_of_engines.py").write_text(KINDS)

    load_engine(f"kinds_of_engines.py:{name}").check({})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing.py:engine", "there is no file nothing.py"),
        ("own_engines.py:engin", "has no engin; its engines: engine"),
        ("neighbour_of_engines:e", "none is decorated with @trinamo.engine"),
        ("./own_engines:engine", r"write \./own_engines\.py:attribute"),
        ("own_engines:number", "own_engines:number is no engine, but int"),
        ("own_engines", "write module:attribute"),
    ],
)
def test_what_is_no_engine_is_a_sentence(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_engine(name)
