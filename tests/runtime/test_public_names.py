"""The public names of `trinamo.runtime` exist, and cost nothing until they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trinamo import runtime


def test_every_public_name_is_there() -> None:
    for name in runtime.__all__:
        assert getattr(runtime, name) is not None
    assert dir(runtime) == sorted(runtime.__all__)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        runtime.nonsense  # noqa: B018 -- the access is the test


def test_the_errors_come_without_the_rest() -> None:
    code = "import sys, trinamo.runtime.errors; print('trio' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout == "False\n"
