"""Copy memory of another process on the same host, by process_vm_readv; Linux only.

The kernel copies straight from one process to the other, at twice the speed of a socket. It wants
both processes to have the same user and a ptrace scope that allows it; where it says no, the stream
carries the blocks. Only ever *reads* from the other process: whoever writes into memory owns it.

Whether two ends are on one host is proved, not claimed: each puts a challenge it was sent into a
`Slot` of its memory, where only a process here can read it. The slot is read again with every
copy, so a process that took over the number of one that died is noticed.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trinamo.runtime.protocol.transfer_stream import HostProof

__all__ = ["Slot", "can_copy_from", "copy_from", "this_host"]

_CHALLENGE_BYTES: Final = 16


@functools.cache
def this_host() -> str | None:
    """A word for this kernel and process namespace; None where copying is not supported."""
    if sys.platform != "linux":
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
        _readv()
    except (OSError, AttributeError):
        return None
    return f"{boot}/{namespace}"


@functools.cache
def _readv() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    function.restype = ctypes.c_ssize_t
    function.argtypes = [
        ctypes.c_int,
        *(ctypes.c_void_p, ctypes.c_ulong),
        *(ctypes.c_void_p, ctypes.c_ulong),
        ctypes.c_ulong,
    ]
    return function


class Slot:
    """16 bytes of our memory that hold the challenge of one peer, and the one we sent it."""

    def __init__(self, dice: random.Random) -> None:
        self._held = ctypes.create_string_buffer(_CHALLENGE_BYTES)
        self._sent = dice.getrandbits(8 * _CHALLENGE_BYTES).to_bytes(_CHALLENGE_BYTES, "little")

    @property
    def proof(self) -> HostProof | None:
        """What to tell the peer; None where copying is not supported."""
        host = this_host()
        if host is None:
            return None
        return HostProof(
            host=host, pid=os.getpid(), slot=ctypes.addressof(self._held), challenge=self._sent
        )

    def hold(self, theirs: HostProof) -> None:
        """Keep the peer's challenge where the peer can read it."""
        ctypes.memmove(self._held, theirs.challenge, _CHALLENGE_BYTES)

    def can_copy_from(self, theirs: HostProof | None) -> bool:
        """Whether the peer is on this host, holds our challenge, and lets us copy."""
        return theirs is not None and can_copy_from(theirs, self._sent)

    def copy_from(
        self, theirs: HostProof, sources: Sequence[tuple[int, int]], targets: Sequence[int]
    ) -> None:
        """`copy_from` with the challenge that the peer was sent."""
        copy_from(theirs, self._sent, sources, targets)


def can_copy_from(proof: HostProof, challenge: bytes) -> bool:
    """Whether the process of `proof` is on this host, holds `challenge`, and may be copied from."""
    if proof.host != this_host():
        return False
    try:
        copy_from(proof, challenge, [], [])
    except OSError:
        return False
    return True


def copy_from(
    proof: HostProof,
    challenge: bytes,
    sources: Sequence[tuple[int, int]],
    targets: Sequence[int],
) -> None:
    """Copy `(address, length)` of the other process to addresses of ours, at most 1,023.

    Blocks the thread for as long as a copy takes: call it with a bounded number of bytes. Raises
    `OSError` if the process is gone or another one, forbids it, or has no memory there; the
    targets may then hold a part of the bytes.
    """
    seen = ctypes.create_string_buffer(_CHALLENGE_BYTES)
    ours, theirs = array("Q"), array("Q")
    ours.extend((ctypes.addressof(seen), _CHALLENGE_BYTES))
    theirs.extend((proof.slot, _CHALLENGE_BYTES))
    wanted = _CHALLENGE_BYTES
    for (source, length), target in zip(sources, targets, strict=True):
        ours.extend((target, length))
        theirs.extend((source, length))
        wanted += length
    count = len(ours) // 2
    copied = _readv()(proof.pid, ours.buffer_info()[0], count, theirs.buffer_info()[0], count, 0)
    if copied < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if copied != wanted:
        raise OSError(f"{copied} of {wanted} bytes could be copied from process {proof.pid}")
    if seen.raw != challenge:
        raise OSError(f"process {proof.pid} is not the peer of this connection")
