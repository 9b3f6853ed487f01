"""KV memory that is there already: a buffer or tensors of an engine, as what transfers need.

An array may be anything with the buffer protocol, a tensor of this machine's memory that speaks
DLPack, or an array of a GPU. Nothing is copied: peers read and write these bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Final

import numpy as np

from ..planes import DeviceMemory
from .device_array import device_memory
from .memory import KvLayout, KvShape, fingerprint
from .pool import BlockPool
from .regions import KvCache, RegionSet


def kv_cache(
    tensors: Any,
    shape: KvShape,
    *,
    layout: KvLayout | str | None = None,
    model: str = "",
    version: str = "1",
    synchronize: Callable[[], None] | None = None,
) -> KvCache:
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
        ValueError: The arrays are not what is said here; the sentence says how. An array that knows
            its element type or its axes must agree with `shape` and `layout`.
    """
    given = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
    order = KvLayout(layout or (KvLayout.BLOCK_FIRST if len(given) == 1 else KvLayout.PER_LAYER))
    axes = order.axes(shape, len(given))
    if axes is None:
        raise ValueError(
            f"{len(given)} arrays: {order} of {shape.layers} layers has {_COUNTS[order]}"
        )
    buffers = [_registrable(each, synchronize, shape.dtype, axes) for each in given]
    lengths = {each.length if isinstance(each, DeviceMemory) else each.nbytes for each in buffers}
    if len(lengths) != 1:
        raise ValueError(f"{len(given)} arrays of different lengths; all must be as long")
    total = lengths.pop() * len(buffers)
    if not total or total % shape.block_bytes:
        raise ValueError(
            f"{total} bytes are no whole number of blocks of {shape.block_bytes} bytes"
        )
    parts, block_count = order.parts_of(shape.layers), total // shape.block_bytes
    memory = RegionSet(
        buffers,
        block_count=block_count,
        range_bytes=shape.block_bytes // parts,
        parts=parts,
        layers=shape.layers,
    )
    said = fingerprint("own", version, model, shape, order)
    return KvCache(memory=memory, pool=BlockPool(block_count), fingerprint=said)


_COUNTS: Final = {
    KvLayout.BLOCK_FIRST: "one array",
    KvLayout.LAYER_FIRST: "one array, one a layer, or K and V of each",
    KvLayout.PER_LAYER: "one array a layer",
}


def _registrable(
    array: Any,
    synchronize: Callable[[], None] | None,
    dtype: str,
    axes: tuple[int | None, ...],
) -> memoryview | DeviceMemory:
    if hasattr(array, "__cuda_array_interface__"):
        if synchronize is None:
            raise ValueError("arrays of a GPU need `synchronize`, such as torch.cuda.synchronize")
        said = array.__cuda_array_interface__
        # The GPU's number as CUDA counts.
        device = array.__dlpack_device__()[1] if hasattr(array, "__dlpack_device__") else 0
        memory = device_memory(array, device=int(device), synchronize=synchronize)
        _agree(np.dtype(said["typestr"]), tuple(said["shape"]), dtype, axes)
        return memory
    host = array if isinstance(array, np.ndarray) else _host_array(array)
    if not (host.flags.c_contiguous and host.flags.writeable):
        raise ValueError("KV memory must be contiguous, in C order, and writable")
    _agree(host.dtype, host.shape, dtype, axes)
    return host.reshape(-1).view(np.uint8).data


def _agree(
    own: np.dtype[Any], shape: tuple[int, ...], dtype: str, axes: tuple[int | None, ...]
) -> None:
    """Peers would move and verify the wrong bytes of an array that is something else.

    Single bytes say nothing of what they are, and fewer axes than there can be nothing of them.
    """
    if own.itemsize > 1 and own != np.dtype(dtype):
        raise ValueError(f"an array of {own.str!r}, but the shape says {dtype!r}")
    if len(shape) >= len(axes) and (
        len(shape) > len(axes)
        or any(want not in {None, size} for want, size in zip(axes, shape, strict=True))
    ):
        wanted = ", ".join("blocks" if each is None else str(each) for each in axes)
        raise ValueError(f"an array of axes {shape}, but the shape and layout say ({wanted})")
    # With fewer axes some are taken together. The blocks must not be, or all of a block's other axes
    # would be read as fewer, larger blocks: one layer's array as that of several.
    is_merged = 1 < len(shape) < len(axes) and axes[0] is None and own.itemsize > 1
    if is_merged and prod(shape[1:]) != prod(size for size in axes[1:] if size is not None):
        wanted = ", ".join("blocks" if each is None else str(each) for each in axes)
        raise ValueError(f"an array of axes {shape}, but the shape and layout say ({wanted})")


def _host_array(array: Any) -> np.ndarray[Any, Any]:
    try:
        return np.frombuffer(memoryview(array), np.uint8)
    except TypeError:
        pass  # It is no buffer.
    except (ValueError, BufferError) as error:
        raise ValueError(f"KV memory must be contiguous: {error}") from error
    if hasattr(array, "__dlpack__"):
        try:
            return np.from_dlpack(array)
        except (BufferError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"{type(array).__name__} cannot be taken by DLPack: {error}; hand over a view of"
                " its bytes (torch: tensor.view(torch.uint8))"
            ) from error
    raise ValueError(f"{type(array).__name__} is neither a buffer nor a tensor")
