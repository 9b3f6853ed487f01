"""Which modules the score is of, and which tests are nearest to each.

The nearest tests are those that a person who changes the module would run first: fast, without
servers of other projects. A mutant that only a test farther off would notice counts as alive.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]

CORE: Final[dict[str, tuple[str, ...]]] = {
    "runtime/caller/client.py": (
        "tests/runtime/caller/test_client.py",
        "tests/runtime/caller/test_waits.py",
    ),
    "runtime/caller/attempts.py": (
        "tests/runtime/caller/test_streams.py",
        "tests/runtime/caller/test_client.py",
        "tests/runtime/caller/test_waits.py",
        "tests/runtime/caller/test_exchange.py",
    ),
    "runtime/caller/migration.py": (
        "tests/runtime/caller/migration/test_*.py",
        "tests/transports/openai/test_going_on.py",
    ),
    "runtime/caller/search.py": (
        "tests/runtime/caller/migration/test_search.py",
        "tests/runtime/caller/test_client.py",
        "tests/runtime/caller/test_waits.py",
    ),
    "runtime/http/admission/admission.py": (
        "properties/http/test_admission_queue.py",
        "tests/runtime/http/admission/test_waiting.py",
        "tests/runtime/http/admission/test_rate.py",
        "tests/runtime/http/models/test_shedding.py",
        "tests/runtime/http/test_shutdown.py",
    ),
    "runtime/http/streaming.py": (
        "tests/runtime/http/test_streaming.py",
        "tests/runtime/http/dialects/test_*.py",
        "tests/attack/test_lengths.py",
        "tests/runtime/http/test_chat.py",
        "tests/runtime/http/test_choices.py",
    ),
    "runtime/kv/transfer/settlement.py": (
        "tests/runtime/kv/transfer/test_transfer_router.py",
        "tests/runtime/kv/transfer/test_grants.py",
        "properties/blocks/test_settled_by_proof.py",
    ),
    "runtime/queues/consumer.py": ("tests/runtime/queues/test_consumer.py",),
    "runtime/context.py": (
        "tests/runtime/test_context.py",
        "tests/runtime/caller/endings/test_deadline.py",
    ),
    "runtime/engines/loop/host.py": (
        "tests/runtime/engines/loop/test_host.py",
        "tests/runtime/engines/loop/test_hop.py",
        "tests/runtime/engines/loop/test_handing_over.py",
        "tests/runtime/http/dialects/test_tasks.py",
    ),
    "runtime/engines/loop/scheduler.py": (
        "tests/runtime/engines/loop/test_scheduler.py",
        "tests/runtime/engines/loop/test_host.py",
    ),
    "runtime/kv/index.py": (
        "tests/runtime/kv/test_kv_index.py",
        "properties/blocks/test_kv_index.py",
    ),
    "runtime/kv/pool.py": ("properties/blocks/test_block_pool.py", "tests/runtime/kv"),
    "runtime/protocol/streams/codec.py": (
        "tests/runtime/protocol/streams/test_codec.py",
        "properties/protocols/test_codec_any_split.py",
    ),
    "runtime/protocol/streams/link_frames.py": (
        "tests/runtime/protocol/streams/test_link_frames.py",
        "properties/protocols/test_link_any_split.py",
    ),
    "runtime/protocol/streams/machine.py": (
        "tests/runtime/protocol/streams/test_machine.py",
        "tests/runtime/protocol/streams/test_re*_stream.py",
    ),
    "runtime/protocol/discovery/lease.py": ("tests/runtime/protocol/discovery/test_lease.py",),
    "runtime/protocol/streams/membership.py": (
        "tests/runtime/protocol/streams/test_membership.py",
        "properties/protocols/test_membership.py",
    ),
    "runtime/protocol/streams/request.py": ("tests/runtime/protocol/streams/test_request.py",),
    "runtime/protocol/events/sequence.py": (
        "tests/runtime/protocol/events/test_sequence.py",
        "properties/protocols/test_sequence.py",
    ),
    "runtime/protocol/transfer/settlement.py": (
        "tests/runtime/protocol/transfer/test_settlement.py",
    ),
    "runtime/protocol/discovery/presence.py": (
        "tests/runtime/protocol/discovery/test_presence.py",
        "tests/runtime/protocol/discovery/test_breaker.py",
        "tests/runtime/caller/test_silence.py",
    ),
    "runtime/protocol/discovery/candidates.py": (
        "tests/runtime/protocol/discovery/test_routing.py",
        "properties/routing/test_choices.py",
    ),
    "runtime/caller/choices.py": (
        "tests/runtime/caller/test_instances.py",
        "tests/runtime/http/models/test_shedding.py",
        "properties/routing/test_choices.py",
    ),
    "runtime/caller/instances.py": (
        "tests/runtime/caller/test_instances.py",
        "properties/protocols/test_live_set.py",
    ),
    "runtime/protocol/queue/work_queue.py": (
        "tests/conformance/events/test_event_plane.py",
        "properties/protocols/test_work_queue.py",
    ),
    "runtime/worker/registration.py": ("tests/runtime/worker/test_re*.py",),
    "runtime/caller/router.py": (
        "tests/runtime/caller/test_router*.py",
        "tests/runtime/caller/test_client*.py",
        "tests/runtime/caller/migration/test_search.py",
    ),
    "runtime/worker/worker.py": (
        "tests/runtime/worker/test_*.py",
        "tests/runtime/caller/test_client*.py",
    ),
    "transports/security/sealing.py": (
        "tests/transports/security/test_sealing.py",
        "properties/simulated/test_sealed_messages.py",
        "tests/attack/test_brokers.py",
        "tests/transports/security/test_signed.py",
        "properties/protocols/test_discovery_entries.py",
    ),
    "transports/security/signed.py": (
        "tests/transports/security/test_signed.py",
        "properties/protocols/test_discovery_entries.py",
    ),
    "transports/security/signatures.py": (
        "tests/transports/security/test_signed.py",
        "tests/transports/security/test_fleet.py",
        "properties/protocols/test_discovery_entries.py",
    ),
    "transports/tcp/transfer/sealed.py": (
        "tests/transports/tcp/transfer/test_pieces.py",
        "tests/transports/tcp/transfer/test_sealed.py",
    ),
    "transports/tcp/accepting.py": ("tests/transports/tcp/test_accepting.py",),
    **dict.fromkeys(
        (
            "transports/tcp/streams/channel.py",
            "transports/tcp/streams/link.py",
            "transports/tcp/streams/linked.py",
            "transports/tcp/streams/registrations.py",
        ),
        ("tests/transports/tcp/streams/test_*.py", "tests/transports/tcp/test_one_link.py"),
    ),
    "transports/tcp/unfinished.py": (
        "tests/transports/tcp/test_unfinished.py",
        "properties/protocols/test_unfinished_budget.py",
    ),
}
