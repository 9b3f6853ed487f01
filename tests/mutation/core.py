"""Which modules the score is of, and which tests are nearest to each.

The nearest tests are those that a person who changes the module would run first: fast, without
servers of other projects. A mutant that only a test farther off would notice counts as alive.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["CORE", "ROOT"]

ROOT: Final = Path(__file__).parents[2]

CORE: Final[dict[str, tuple[str, ...]]] = {
    "runtime/client.py": ("tests/runtime/test_client*.py",),
    "runtime/consumer.py": ("tests/runtime/test_consumer.py",),
    "runtime/context.py": ("tests/runtime/test_context.py",),
    "runtime/engines/host.py": ("tests/runtime/engines/test_host.py",),
    "runtime/engines/scheduler.py": (
        "tests/runtime/engines/test_scheduler.py",
        "tests/runtime/engines/test_host.py",
    ),
    "runtime/kv/index.py": ("tests/runtime/kv/test_kv_index.py", "properties/test_kv_index.py"),
    "runtime/kv/pool.py": ("properties/test_block_pool.py", "tests/runtime/kv"),
    "runtime/protocol/codec.py": (
        "tests/runtime/protocol/test_codec.py",
        "properties/test_codec_any_split.py",
    ),
    "runtime/protocol/control.py": ("tests/runtime/protocol/test_control.py",),
    "runtime/protocol/lease.py": ("tests/runtime/protocol/test_lease.py",),
    "runtime/protocol/membership.py": (
        "tests/runtime/protocol/test_membership.py",
        "properties/test_membership.py",
    ),
    "runtime/protocol/request.py": ("tests/runtime/protocol/test_request.py",),
    "runtime/protocol/sequence.py": (
        "tests/runtime/protocol/test_sequence.py",
        "properties/test_sequence.py",
    ),
    "runtime/protocol/settlement.py": ("tests/runtime/protocol/test_settlement.py",),
    "runtime/protocol/silence.py": (
        "tests/runtime/protocol/test_silence.py",
        "tests/runtime/test_silence.py",
    ),
    "runtime/protocol/work_queue.py": (
        "tests/conformance/test_work_queue*.py",
        "properties/test_work_queue.py",
    ),
    "runtime/registration.py": ("tests/runtime/test_registration*.py",),
    "runtime/router.py": ("tests/runtime/test_router*.py", "tests/runtime/test_client*.py"),
    "runtime/worker.py": ("tests/runtime/test_worker*.py", "tests/runtime/test_client*.py"),
    "transports/tcp/accepting.py": ("tests/transports/tcp/test_accepting.py",),
    "transports/tcp/unfinished.py": (
        "tests/transports/tcp/test_unfinished.py",
        "properties/test_unfinished_budget.py",
    ),
}
