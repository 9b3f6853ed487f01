"""KV memory that is there already: a buffer or tensors of an engine, as what transfers need.

An array may be anything with the buffer protocol, a tensor of this machine's memory that speaks
DLPack, or an array of a GPU. Nothing is copied: peers read and write these bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import RequestError
from ..planes.transfer import DeviceMemory
from .cache import KvCache
from .device_array import device_memory
from .memory import KvLayout, KvShape, fingerprint
from .pool import BlockPool
from .regions import RegionSet


def kv_cache(
    tensors: Any,
    shape: KvShape,
    *,
    layout: KvLayout | str | None = None,
    model: str = "",
    version: str = "1",
    synchronize: Callable[[], None] | None = None,
) -> KvCache[RegionSet]:
    """The KV memory of an engine of your own, for `open_runtime(kv=…)`; nothing is copied.

    How many blocks it holds follows from its bytes. Of what the cache says, `pool` is yours: take
    blocks from it, or give them back, as sequences need them.

    Args:
        tensors: One array, or a list of as long ones, such as one for each layer. Contiguous and
            writable: numpy, `bytearray`, `mmap`, tensors by DLPack, arrays of a GPU.
        shape: What one block holds; `shape.block_bytes` is its size in all layers.
        layout: The order of the axes. None: of one array `block_first`, of several `per_layer`.
            Tensors of one layer each as `[K/V, block, …]` are `layer_first`.
        model: What tells models apart: peers move blocks only between caches that say the same, of
            the same shape and layout.
        version: Of whatever decides what the bytes mean, likewise.
        synchronize: Returns once the GPU's work on the arrays is done, from whichever thread it is
            called; needed for arrays of a GPU (`torch.cuda.synchronize`).

    Raises:
        RequestError: The arrays are not what is said here; the sentence says how.
    """
    given = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
    buffers = [_registrable(each, synchronize) for each in given]
    order = KvLayout(layout or (KvLayout.BLOCK_FIRST if len(given) == 1 else KvLayout.PER_LAYER))
    lengths = {_length(each) for each in buffers}
    if len(lengths) != 1:
        raise RequestError(f"{len(given)} arrays of different lengths; all must be as long")
    length = lengths.pop()
    total = length * len(buffers)
    if not total or total % shape.block_bytes:
        raise RequestError(
            f"{total} bytes are no whole number of blocks of {shape.block_bytes} bytes"
        )
    parts = order.parts_of(shape.layers)
    block_count, range_bytes = total // shape.block_bytes, shape.block_bytes // parts
    if length % range_bytes:
        raise RequestError(
            f"arrays of {length} bytes would cut blocks apart: {order} has them in pieces of"
            f" {range_bytes} bytes"
        )
    memory = RegionSet(
        buffers,
        block_count=block_count,
        range_bytes=range_bytes,
        parts=parts,
        layers=shape.layers,
    )
    said = fingerprint("own", version, model, shape, order)
    return KvCache(memory=memory, pool=BlockPool(block_count), fingerprint=said)


def _registrable(array: Any, synchronize: Callable[[], None] | None) -> memoryview | DeviceMemory:
    if hasattr(array, "__cuda_array_interface__"):
        if synchronize is None:
            raise RequestError("arrays of a GPU need `synchronize`, such as torch.cuda.synchronize")
        return device_memory(array, device=_device_of(array), synchronize=synchronize)
    host = array if isinstance(array, np.ndarray) else _host_array(array)
    if not (host.flags.c_contiguous and host.flags.writeable):
        raise RequestError("KV memory must be contiguous, in C order, and writable")
    return host.reshape(-1).view(np.uint8).data


def _host_array(array: Any) -> np.ndarray[Any, Any]:
    try:
        return np.frombuffer(memoryview(array), np.uint8)
    except TypeError:
        pass  # It is no buffer.
    except (ValueError, BufferError) as error:
        raise RequestError(f"KV memory must be contiguous: {error}") from error
    if hasattr(array, "__dlpack__"):
        try:
            return np.from_dlpack(array)
        except (BufferError, RuntimeError, TypeError) as error:
            raise RequestError(
                f"{type(array).__name__} cannot be taken by DLPack: {error}; hand over a view of"
                " its bytes (torch: tensor.view(torch.uint8))"
            ) from error
    raise RequestError(f"{type(array).__name__} is neither a buffer nor a tensor")


def _device_of(array: Any) -> int:
    """The GPU's number as CUDA counts."""
    if hasattr(array, "__dlpack_device__"):
        _, device = array.__dlpack_device__()
        return int(device)
    return 0


def _length(buffer: memoryview | DeviceMemory) -> int:
    return buffer.length if isinstance(buffer, DeviceMemory) else buffer.nbytes
