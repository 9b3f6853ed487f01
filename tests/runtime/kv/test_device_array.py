"""Arrays of GPU libraries become memory that can be registered, or are refused in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from trinamo.runtime.kv.device_array import device_memory

ADDRESS = 0x7F00_0000_0000


class Array:
    """What an array of 3 x 4 x 8 half-precision numbers says, with changes."""

    def __init__(self, **changes: Any) -> None:
        said = {"shape": (3, 4, 8), "typestr": "<f2", "data": (ADDRESS, False), "version": 3}
        self.__cuda_array_interface__: Mapping[str, Any] = {**said, **changes}


def synchronize() -> None:
    """Nothing is queued."""


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"strides": None},
        {"strides": (64, 16, 2)},
        # The stride of an axis with one item says nothing.
        {"shape": (1, 12, 8), "strides": (2, 16, 2)},
    ],
)
def test_all_bytes_of_an_array_are_described(changes: dict[str, Any]) -> None:
    memory = device_memory(Array(**changes), device=1, synchronize=synchronize)
    assert (memory.address, memory.length, memory.device) == (ADDRESS, 3 * 4 * 8 * 2, 1)
    assert memory.synchronize is synchronize


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"data": (ADDRESS, True)}, "writable"),
        ({"shape": (3, 0, 8)}, "empty"),
        ({"strides": (64, 2, 8)}, "contiguous"),
        ({"strides": (128, 16, 2)}, "contiguous"),
        ({"typestr": "<"}, "no array of a GPU"),
        ({"data": ADDRESS}, "no array of a GPU"),
        ({"shape": 96}, "no array of a GPU"),
    ],
)
def test_what_cannot_be_moved_as_it_is_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        device_memory(Array(**changes), device=0, synchronize=synchronize)


def test_an_array_of_the_process_is_refused() -> None:
    with pytest.raises(ValueError, match="bytearray is no array of a GPU"):
        device_memory(bytearray(8), device=0, synchronize=synchronize)  # type: ignore[arg-type]
