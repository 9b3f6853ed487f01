"""A transfer between two processes of one host: the receiving one copies, slice by slice.

The event loop gets its turn after every slice of about 2 MB (0.3 ms), so no thread is needed and
a fenced flow stops at once. What this does not know: who asked (`transfer_owner.py`,
`transfer_initiator.py`) and whether the source was valid all the time, which the other end says.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import trio

from trinamo.runtime.protocol.transfer_stream import HostProof

from .local_memory import Slot
from .transfer_memory import Flow

__all__ = ["Neighbour"]


@attrs.frozen
class Neighbour:
    """A peer on the same host that lets us copy from its memory."""

    proof: HostProof
    slot: Slot

    async def copy(
        self,
        flow: Flow,
        source_base: int,
        source_blocks: Sequence[int],
        *,
        slice_bytes: int,
    ) -> bytes:
        """Copy all blocks of `flow`; their checksums if the flow has one.

        Raises `OSError` if the other process does not let us (any more), with `flow.position`
        blocks copied, and the flow's error if it is fenced.
        """
        sums = bytearray()
        size = flow.region.block_bytes
        while not flow.is_complete:
            first = flow.position
            count = flow.next_count(slice_bytes)
            flow.begin(count)
            targets = [flow.region.base + b * size for b in flow.blocks[first : first + count]]
            sources = [(source_base + b * size, size) for b in source_blocks[first : first + count]]
            self.slot.copy_from(self.proof, sources, targets)
            sums += await flow.sums()
            flow.end()
            await trio.lowlevel.checkpoint()
            flow.check_live()
        return bytes(sums)
