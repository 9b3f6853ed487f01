"""What must be equal for two engines to exchange KV bytes, as one readable line of facts.

It travels with the description of an engine's memory (`protocol/transfer/description.py`) and is
compared before two engines are connected, so engines that differ never pair. Sans-IO.
"""

from __future__ import annotations

from collections.abc import Mapping


def encode_fingerprint(facts: Mapping[str, object]) -> str:
    """The facts in their order, such as `engine=exact version=1`.

    Raises `ValueError` for a fact that could not be told from the next one.
    """
    words = [f"{name}={value}" for name, value in facts.items()]
    if wrong := next((word for word in words if len(word.split()) != 1), None):
        raise ValueError(f"{wrong!r} is no fact of a fingerprint: it has white space in it")
    return " ".join(words)


def differences(ours: str, theirs: str) -> str:
    """In which facts two fingerprints differ, for a reader; empty if they are equal."""
    if ours == theirs:
        return ""
    here, there = _facts(ours), _facts(theirs)
    return "; ".join(
        f"{name.replace('_', ' ')} {here.get(name, 'none')} here, {there.get(name, 'none')} there"
        for name in (*here, *(name for name in there if name not in here))
        if here.get(name) != there.get(name)
    )


def _facts(fingerprint: str) -> dict[str, str]:
    """What is no fact counts as one without a name."""
    pairs = [word.partition("=") for word in fingerprint.split()]
    return {name if mark else "": value if mark else name for name, mark, value in pairs}
