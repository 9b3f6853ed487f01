"""`trinamo sim conform`: what the comparison with the kernel says, in words."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Final

import trio

from .files import EXIT_BROKEN, refuse
from .text import quietly, say

if TYPE_CHECKING:
    from trinamo.sim.conformance.compare import Strange
    from trinamo.sim.explore import Scenario


STRANGE_MAX: Final = 5
CONTEXT: Final = 3


def compare_with_kernel(play: Scenario, seed: int, seeds: range, timeout_s: float) -> int:
    """Play for real, compare, say what was found; the exit code."""
    from trinamo.sim.conformance.compare import conform, refusals
    from trinamo.sim.scenario.file import parse_scenario

    scenario = parse_scenario(play.parameters["text"], play.parameters["where"])
    if why := refusals(scenario):
        refuse(f"{scenario.name} cannot be played on loopback: {'; '.join(why)}")
    with quietly():
        try:
            found = conform(scenario, seed=seed, seeds=seeds, timeout_s=timeout_s)
        except trio.TooSlowError:
            refuse(f"{scenario.name} took more than {timeout_s:g} real s (--timeout)", EXIT_BROKEN)
    how = "every note equal" if found.is_exact else "runs of tokens counted as one"
    say(f"{scenario.name}, seed {seed}, on loopback sockets in real time: {how}, times aside")
    say(f"  {found.same} of {found.requests} requests as in the simulated run of this seed")
    if found.elsewhere:
        say(f"  {found.elsewhere} as in another simulated run")
    for kind in found.missing:
        say(f"  the note {kind} is expected and did not occur")
    for strange in found.strange[:STRANGE_MAX]:
        _tell(strange)
    say("Conforms." if found.conforms else "Does NOT conform: no simulated run shows this.")
    return 0 if found.conforms else EXIT_BROKEN


def _tell(strange: Strange) -> None:
    pairs = list(zip_longest(strange.real, strange.simulated))
    first = next((n for n, (real, fake) in enumerate(pairs) if real != fake), 0)
    say(f"  {strange.request} at its {strange.role}, from note {first} on:")
    for real, fake in pairs[max(0, first - 1) : first + CONTEXT]:
        say(f"    kernel {_entry(real):<60} simulator {_entry(fake)}")


def _entry(entry: tuple[str, tuple[tuple[str, object], ...]] | None) -> str:
    if entry is None:
        return "-"
    return " ".join([entry[0], *(f"{name}={value}" for name, value in entry[1])])
