"""Model files between the workers of a cluster."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from .keys import Bytes, Port, Seconds, Section, about


class WeightsConfig(Section, frozen=True, kw_only=True):
    """A worker without its model's file takes it from a peer; see `docs/weights.md`."""

    enabled: Annotated[
        bool, about("Offer our model file to peers, and take theirs where ours is missing.")
    ] = True
    bytes_per_second_max: Annotated[Bytes, about("Lent to all peers together, beside serving.")] = (
        256 << 20
    )
    peers_max: Annotated[
        Annotated[int, Meta(ge=1, le=64)],
        about("Peers that take from us at once; the next one is refused, and tries another."),
    ] = 4
    chunk_bytes: Annotated[
        Annotated[int, Meta(ge=4096, le=1 << 26, extra={"unit": "bytes"})],
        about(
            "Read, sent and checked at once. A holder registers twice as much memory for each of"
            " `peers_max`, and touches it when it is asked."
        ),
    ] = 4 << 20
    file_bytes_max: Annotated[Bytes, about("A larger file is not taken.")] = 1 << 38
    patience_s: Annotated[
        Seconds, about("How long a worker without a file looks for a peer that lends it.")
    ] = 60.0
    stall_timeout_s: Annotated[
        Seconds,
        about(
            "A holder that brings no chunk for so long is left for another. Longer than"
            " `chunk_bytes` of each of `peers_max` take at `bytes_per_second_max`."
        ),
    ] = 30.0
    port: Annotated[Port, about("Port of a holder for these reads; 0: the system chooses.")] = 0
