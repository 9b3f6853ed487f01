"""The README and the docs tell the truth: commands, options, links, file names, YAML.

A fenced `console` or `sh` block holds commands on lines that begin with `$ `. Those of `trinamo`
are looked up in the command tree itself, those of `make` in the Makefile, those of `python` in the
tree; other programs are taken as they are.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import attrs
import pytest
import typer

from tests.sources import ROOT, listed
from trinamo.runtime.config.config import Config, load_config
from trinamo.runtime.config.source import read_yaml
from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.http.status import STATUS_TABLE

PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")],
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]\n]+\]\(([^)\s]+)\)")
FILE_NAME = re.compile(
    r"`((?:runtime|transports|sim|src|tests|properties|bench|docs|examples)/[\w./-]+)`"
)
ASSIGNMENT = re.compile(r"[A-Z_][A-Z0-9_]*=")
ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \| (yes|no) \| (\d+) \|", re.MULTILINE)
REDIRECTION = re.compile(r"\s\d?>{1,2}(?:&\d|\s*\S+)")
SEPARATORS = {"|", "||", "&&", "&", ";"}


@attrs.frozen
class Line:
    """One command of a page, already split into words."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for language, body in FENCE.findall(page.read_text("utf-8")):
        if language in languages:
            yield body


def commands() -> Iterator[Line]:
    for page in PAGES:
        for body in blocks(page, "console", "sh"):
            joined = body.replace("\\\n", " ")
            for line in joined.splitlines():
                if line.startswith("$ "):
                    yield from split(name_of(page), line.removeprefix("$ "))


def split(page: str, line: str) -> Iterator[Line]:
    """The commands of one shell line, redirections left out."""
    lexer = shlex.shlex(REDIRECTION.sub("", line), posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word in SEPARATORS:
            if words:
                yield Line(page, tuple(words))
            words = []
        else:
            words.append(word)


def program(line: Line) -> tuple[list[str], str, list[str]]:
    """Leading assignments, the program's name, its arguments."""
    words = list(line.words)
    assignments = []
    while words and ASSIGNMENT.match(words[0]):
        assignments.append(words.pop(0))
    return assignments, Path(words[0]).name if words else "", words[1:]


def problem_of(root: Any, arguments: list[str]) -> str | None:
    """Why these arguments do not fit the command tree, or None if they do."""
    command = root
    words = list(arguments)
    free: list[str] = []
    while words:
        word = words.pop(0)
        if word == "--":
            free += words
            break
        if word.startswith("-") and word != "-":
            found = option_problem(command, word, words)
            if found is not None:
                return found
        elif hasattr(command, "commands"):
            if word not in command.commands:
                return f"no command {word!r} in {command.name or 'trinamo'}"
            command = command.commands[word]
        else:
            free.append(word)
    taken = [p.nargs for p in command.params if p.param_type_name == "argument"]
    if -1 not in taken and len(free) > sum(taken):
        return f"{command.name} takes {sum(taken)} arguments, not {len(free)}"
    return None


def option_problem(command: Any, word: str, words: list[str]) -> str | None:
    """Check one option, taking its values off `words`."""
    name, has_value, value = word.partition("=")
    if name in ("--help", "-h"):
        return None
    for param in command.params:
        if param.param_type_name == "option" and name in (*param.opts, *param.secondary_opts):
            if param.is_flag or getattr(param, "count", False):
                return None
            values = [value] if has_value else [words.pop(0) for _ in range(param.nargs) if words]
            if len(values) < param.nargs:
                return f"{name} needs a value"
            return choice_problem(param, values)
    return f"no option {name!r} in {command.name}"


def choice_problem(param: Any, values: list[str]) -> str | None:
    choices = choices_of(param)
    wrong = [value for value in values if choices and value not in choices]
    return f"{param.name} is one of {', '.join(choices)}, not {wrong[0]}" if wrong else None


def choices_of(param: Any) -> list[str]:
    """What an option allows, if it is a choice: typer keeps the annotation, click a type."""
    descriptor = getattr(param, "type_descriptor", None)
    if descriptor is None:
        return [str(choice) for choice in getattr(param.type, "choices", ())]
    return list(words_of(descriptor.annotation))


def words_of(annotation: Any) -> Iterator[str]:
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        yield from (str(member.value) for member in annotation)
    for part in get_args(annotation):
        if get_origin(annotation) is Literal:
            yield str(part)
        else:
            yield from words_of(part)


@pytest.fixture(scope="module")
def tree() -> Any:
    main = importlib.import_module("trinamo.cli.main")
    return typer.main.get_command(main.app)


def targets() -> set[str]:
    rules = re.findall(
        r"^([A-Za-z][\w-]*):(?!=)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE
    )
    return set(rules)


def test_every_trinamo_command_exists_with_its_options(tree: Any) -> None:
    wrong = [
        f"{line}: {problem}"
        for line in commands()
        for _, name, arguments in [program(line)]
        if name == "trinamo"
        if (problem := problem_of(tree, arguments)) is not None
    ]

    assert not wrong, listed(wrong)


def test_options_inside_make_arguments_exist(tree: Any) -> None:
    """`make up ARGS="--workers 2"` passes its words to `trinamo up`."""
    wrong = [
        f"{line}: {problem}"
        for line in commands()
        for _, name, arguments in [program(line)]
        if name == "make" and "up" in arguments
        for word in arguments
        if word.startswith("ARGS=")
        if (problem := problem_of(tree, ["up", *shlex.split(word.removeprefix("ARGS="))]))
        is not None
    ]

    assert not wrong, listed(wrong)


def test_every_make_target_exists() -> None:
    wrong = [
        str(line)
        for line in commands()
        for _, name, arguments in [program(line)]
        if name == "make"
        for word in arguments
        if "=" not in word and not word.startswith("-") and word not in targets()
    ]

    assert not wrong, listed(wrong)


def test_every_python_command_has_its_file() -> None:
    wrong = [
        str(line)
        for line in commands()
        for _, name, arguments in [program(line)]
        if name.startswith("python") and arguments
        if not is_there(arguments)
    ]

    assert not wrong, listed(wrong)


def test_every_address_that_is_asked_is_the_one_that_a_frontend_has_by_default() -> None:
    """Whoever types what a page shows, beside a `trinamo up`, gets an answer."""
    port = Config().http.port
    wrong = [
        str(line)
        for line in commands()
        if program(line)[1] == "curl"
        for found in re.findall(r"(?:localhost|127\.0\.0\.1):(\d+)", " ".join(line.words))
        if int(found) != port
    ]

    assert not wrong, listed(wrong)


def is_there(arguments: list[str]) -> bool:
    if arguments[0] == "-m":
        return importlib.util.find_spec(arguments[1]) is not None
    return arguments[0].startswith("-") or (ROOT / arguments[0]).is_file()


def test_every_variable_in_a_command_is_known() -> None:
    for line in commands():
        assignments, _, _ = program(line)
        pairs = [each.split("=", 1) for each in assignments]
        load_config(environ=dict(pairs))  # raises, naming the variable


def test_every_yaml_block_is_a_configuration() -> None:
    for page in PAGES:
        for body in blocks(page, "yaml"):
            read_yaml(Config, body, f"the YAML in {name_of(page)}")


def test_every_python_block_compiles() -> None:
    for page in PAGES:
        for body in blocks(page, "python"):
            compile(body, f"the Python in {name_of(page)}", "exec")


def anchors(page: Path) -> set[str]:
    """Headings as the anchors they get: lower case, words joined by dashes."""
    text = FENCE.sub("", page.read_text("utf-8"))
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def test_every_link_inside_the_repository_leads_somewhere() -> None:
    wrong = []
    for page in PAGES:
        for link in LINK.findall(FENCE.sub("", page.read_text("utf-8"))):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                wrong.append(f"{name_of(page)}: {link}")

    assert not wrong, listed(wrong)


def error_classes(root: type[TrinamoError] = TrinamoError) -> Iterator[type[TrinamoError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == TrinamoError.__module__:
            yield from error_classes(child)


def status_of(kind: type[TrinamoError]) -> int:
    return next(STATUS_TABLE[each].status for each in kind.__mro__ if each in STATUS_TABLE)


def test_the_page_of_errors_has_every_class_as_it_is() -> None:
    page = (ROOT / "docs" / "errors.md").read_text("utf-8")
    told = {row[0]: row[1:] for row in ROW.findall(page)}

    assert told == {
        kind.__name__: (kind.code, "yes" if kind.default_definite else "no", str(status_of(kind)))
        for kind in error_classes()
    }


def test_every_file_the_docs_name_exists() -> None:
    wrong = [
        f"{name_of(page)}: {name}"
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for name in FILE_NAME.findall(page.read_text("utf-8"))
        if not (ROOT / name).exists() and not (ROOT / "src" / "trinamo" / name).exists()
    ]

    assert not wrong, listed(wrong)


# --- the checks themselves ---------------------------------------------------------------------


def small_tree() -> Any:
    app = typer.Typer()

    @app.command()
    def up(workers: int = 1, engine: Literal["a", "b"] = "a", verbose: bool = False) -> None:
        pass

    @app.command()
    def chat(prompt: str) -> None:
        pass

    return typer.main.get_command(app)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("up --workers 2 --verbose", None),
        ("up --workers=2", None),
        ("up --help", None),
        ('chat "Say hello"', None),
        ("up --engine b", None),
        ("up --engine c", "engine is one of a, b, not c"),
        ("up --worker 2", "no option '--worker'"),
        ("up --workers", "--workers needs a value"),
        ("down", "no command 'down'"),
        ("chat one two", "takes 1 arguments, not 2"),
    ],
)
def test_a_wrong_command_is_found(line: str, problem: str | None) -> None:
    found = problem_of(small_tree(), shlex.split(line))

    assert found is None if problem is None else problem in (found or "")


def test_a_shell_line_is_split_into_its_commands() -> None:
    found = list(split("p", "A=1 trinamo up --port 1 > log 2>&1 | tail -1 && make test # why"))

    assert found[0].words[:4] == ("A=1", "trinamo", "up", "--port")
    assert [program(line)[1] for line in found] == ["trinamo", "tail", "make"]
