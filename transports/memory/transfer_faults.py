"""What may go wrong with the transfers of the in-memory plane."""

from __future__ import annotations

import attrs


@attrs.define(kw_only=True)
class TransferFaults:
    """What goes wrong with the transfers and inquiries that one plane starts, from now on."""

    is_unreachable: bool = False
    """Peers cannot be reached, and transfers fail before a block has moved."""
    is_frozen: bool = False
    """Whoever asks this plane gets no answer, as of a process that was stopped."""
    breaks_after: int | None = None
    """The connection breaks after so many blocks of a transfer."""
    stalls_after: int | None = None
    """Nothing moves any more after so many blocks, as if the peer were stopped."""
    corrupts: int | None = None
    """A bit of this block of a transfer turns over on the way."""
    lands_late: bool = False
    """An aborted or failed transfer goes on moving, and is settled only when all has moved."""
    block_s: float = 0.0
    """How long one block takes."""
