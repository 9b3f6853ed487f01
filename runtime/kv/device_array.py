"""A GPU array of another library as memory that a transfer plane registers.

Torch tensors, CuPy arrays and Numba's device arrays say where they are by the same attribute,
`__cuda_array_interface__` (version 2 and 3 of Numba's CUDA array interface); none of these
libraries is imported here. Which device it is, and how to wait for the work queued on it, only
the caller knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ..planes import DeviceMemory


class DeviceArray(Protocol):
    """An array on a GPU."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        """`shape`, `typestr`, `data` (address, whether it is read-only) and perhaps `strides`."""
        ...


def device_memory(
    array: DeviceArray, *, device: int, synchronize: Callable[[], None]
) -> DeviceMemory:
    """The bytes of `array`, all of them, in C order; keep the array alive while it is registered.

    `device` is the GPU's number as CUDA counts (`tensor.device.index`, `array.device.id`).
    `synchronize` returns once the work that writes or reads the array is done, from whichever
    thread it is called in (`torch.cuda.Stream.synchronize`, `cupy.cuda.Stream.synchronize` of the
    stream the engine works on). Raises `ValueError` for an array that is read-only, empty, not
    contiguous, or says nothing that can be understood.
    """
    try:
        said = array.__cuda_array_interface__
        shape: Sequence[int] = tuple(said["shape"])
        address, is_read_only = said["data"]
        item_bytes = int(said["typestr"][2:])
        strides = said.get("strides")
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{type(array).__name__} is no array of a GPU: {error!r}") from error
    length = math.prod(shape) * item_bytes
    if is_read_only:
        raise ValueError("memory to register must be writable")
    if not length:
        raise ValueError("memory to register must not be empty")
    if strides is not None and not _is_contiguous(shape, strides, item_bytes):
        raise ValueError("memory to register must be contiguous, in C order")
    return DeviceMemory(address=address, length=length, device=device, synchronize=synchronize)


def _is_contiguous(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> bool:
    expected = item_bytes
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
