"""What the mutation run changes, and that its tables name files that exist."""

from __future__ import annotations

import pytest

from tests.mutation.core import CORE, ROOT
from tests.mutation.mutations import mutations


def changed(code: str) -> list[str]:
    text = code.encode()
    return [each.apply(text).decode() for each in mutations(text)]


@pytest.mark.parametrize(
    ("code", "mutants"),
    [
        ("ok = a < b", ["ok = (a <= b)"]),
        ("x = n + 1", ["x = (n - 1)", "x = n + 2"]),
        ("x = a and b", ["x = (a or b)", "x = (b)", "x = (a)"]),
        ("if a: f()", ["if (not (a)): f()", "if a: pass"]),
        ("x.y = True", ["pass", "x.y = False"]),
        ("while a:\n    break", ["while a:\n    continue"]),
        ("é = 'ü'; x = 1", ["é = 'ü'; x = 2"]),
        ("def f(a: Literal[1] = 2): ...", ["def f(a: Literal[1] = 3): ..."]),
        ("_log.info('%d', 1)", []),
        ("assert a < b", []),
        ("__all__ = ['f']", []),
        ("x: Final[int]", []),
        ('f"{1}"', []),
    ],
)
def test_each_mistake_is_one_that_a_hand_could_make(code: str, mutants: list[str]) -> None:
    assert sorted(changed(code)) == sorted(mutants)


@pytest.mark.parametrize("module", CORE)
def test_every_mutant_of_the_core_is_another_program(module: str) -> None:
    text = (ROOT / module).read_bytes()
    found = mutations(text)
    assert found
    for each in found:
        mutant = each.apply(text)
        assert mutant != text
        compile(mutant, module, "exec")


@pytest.mark.parametrize("module", CORE)
def test_the_nearest_tests_exist(module: str) -> None:
    assert [pattern for pattern in CORE[module] if not list(ROOT.glob(pattern))] == []
