"""Names of blocks: what makes two equal, and what two processes know of each other's."""

from __future__ import annotations

from trinamo.runtime.protocol.kv.names import HASH_BYTES, BlockNames, block_keys

NAMES = BlockNames(b"what a cluster knows")


def test_a_block_is_named_by_its_tokens_and_all_before_them() -> None:
    root = NAMES.root("")
    first, second = NAMES.of_tokens([1, 2, 3, 4, 5], 2, root)
    assert NAMES.of_tokens([1, 2], 2, root) == [first]
    assert NAMES.of_tokens([3, 4], 2, first) == [second]
    assert NAMES.of_tokens([9, 2, 3, 4], 2, root)[1] != second
    assert NAMES.of_tokens([1], 2, root) == []
    assert [len(name) for name in (root, first, second)] == [HASH_BYTES] * 3 == [16] * 3


def test_who_knows_a_name_but_not_the_key_names_no_other_block() -> None:
    """Not the next one either, whose parent and tokens he may know."""
    parent, child = NAMES.of_tokens([1, 2, 3, 4], 2, NAMES.root(""))
    assert BlockNames().of_tokens([3, 4], 2, parent) != [child]


def test_names_are_the_same_in_every_process_and_release() -> None:
    """What changes them must change the version in the mark, too."""
    [name] = NAMES.of_tokens([1, 2], 2, NAMES.root("tenant"))
    assert (NAMES.mark, name.hex()) == ("2-665f6c0b", "9be49b59b273ecc9c45d0f655ae62f49")


def test_a_key_is_60_bits_of_a_name() -> None:
    names = (bytes(8) + b"\xff" * 8, b"\xff" * 8 + bytes(7) + b"\1")
    assert block_keys(names) == ((1 << 60) - 1, 1)
