"""A GPU's memory by the driver's own library, for tests: no CUDA toolkit, no torch, no cupy.

The functions are those of the CUDA driver API, which every NVIDIA driver installs as
`libcuda.so.1`; `find_gpu` says whether there is one with a GPU behind it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from trinamo.runtime.planes import DeviceMemory

_NON_BLOCKING: Final = 1
"""`CU_STREAM_NON_BLOCKING`: nobody else's work orders what is queued here."""


class Gpu:
    """The first GPU, with a stream of its own."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        self._driver = driver
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self._context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.enter()
        self.stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(self.stream), _NON_BLOCKING)

    def call(self, name: str, *arguments: object) -> None:
        """One call of the driver; raises `OSError` with the number it answers if it fails."""
        result = getattr(self._driver, name)(*arguments)
        if result:
            raise OSError(f"{name} answers {result}")

    def enter(self) -> None:
        """Make the GPU this thread's: the driver wants that in every thread."""
        self.call("cuCtxSetCurrent", self._context)

    def synchronize(self) -> None:
        """Return when all that was queued on the stream is done; from any thread."""
        self.enter()
        self.call("cuStreamSynchronize", self.stream)

    @contextmanager
    def allocated(self, content: bytes) -> Iterator[GpuMemory]:
        """Memory that holds `content`, freed in the end."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(len(content)))
        memory = GpuMemory(self, address.value, len(content))
        try:
            memory.write(content)
            yield memory
        finally:
            self.call("cuMemFree_v2", address)


class GpuMemory:
    """A piece of it."""

    def __init__(self, gpu: Gpu, address: int, length: int) -> None:
        self.gpu, self.length = gpu, length
        self._address = ctypes.c_uint64(address)

    @property
    def as_device_memory(self) -> DeviceMemory:
        """What a transfer plane registers."""
        return DeviceMemory(
            address=self._address.value,
            length=self.length,
            device=0,
            synchronize=self.gpu.synchronize,
        )

    def write(self, content: bytes) -> None:
        """Now, whatever is queued."""
        assert len(content) == self.length
        self.gpu.call("cuMemcpyHtoD_v2", self._address, content, ctypes.c_size_t(self.length))

    def read(self) -> bytes:
        """Now, whatever is queued."""
        found = ctypes.create_string_buffer(self.length)
        self.gpu.call("cuMemcpyDtoH_v2", found, self._address, ctypes.c_size_t(self.length))
        return found.raw

    def queue_fill(self, value: int) -> None:
        """Set every byte, once all that was queued before is done."""
        size = ctypes.c_size_t(self.length)
        self.gpu.call(
            "cuMemsetD8Async", self._address, ctypes.c_ubyte(value), size, self.gpu.stream
        )

    def queue_copy_of(self, other: GpuMemory) -> None:
        """Take the bytes of another one of the same size, once all queued before is done."""
        size = ctypes.c_size_t(self.length)
        self.gpu.call("cuMemcpyDtoDAsync_v2", self._address, other._address, size, self.gpu.stream)


def find_gpu() -> Gpu | None:
    """The first GPU of this machine; None if there is no driver, or none behind it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    return Gpu(driver)
