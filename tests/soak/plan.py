"""What a soak does, made of its seed alone: turns, faults, questions and what each client does.

Nothing is started here. Two runs with the same seed and the same options play the same plan; what
comes of it also depends on the machine. Read `soak.py` next, which plays it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import attrs

from tests.soak.tools import MODEL as CALLER, TOOLS

TOOLS_FILE: Final = Path(__file__).with_name("tools.py")
QUESTIONS: Final = 32
CALLS: Final = 4
"""Questions besides, which the model that calls tools answers."""
FIRST_FAULT_S: Final = 3.0
WORDS: Final = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "brew",
    "black",
    "tea",
]


class Act(enum.StrEnum):
    """What is done to a process."""

    KILL = "killed"
    TERMINATE = "terminated"
    STOP = "stopped"


@attrs.frozen
class Fault:
    """`act` is done to `targets` at `at_s` of the turn; they are back, or continued, `away_s` later."""

    at_s: float
    act: Act
    targets: tuple[str, ...]
    away_s: float

    def __str__(self) -> str:
        back = "continued" if self.act is Act.STOP else "started again"
        return f"{' and '.join(self.targets)} {self.act}, {back} after {self.away_s:.1f} s"


@attrs.frozen
class Question:
    """Something that has one right answer."""

    number: int
    path: str
    body: dict[str, Any]

    def asked(self, *, is_streamed: bool) -> dict[str, Any]:
        more = {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
        return {**self.body, **more}


@attrs.frozen
class Ask:
    """What a client does next."""

    question: Question
    is_streamed: bool
    leaves_after_s: float | None
    """None: it waits for the end."""
    pause_s: float


@attrs.frozen
class Turn:
    """One shape of the cluster, under faults for `length_s`."""

    number: int
    roles: tuple[str, ...]
    settings: dict[str, Any]
    length_s: float
    questions: tuple[Question, ...]
    faults: tuple[Fault, ...]

    @property
    def is_disaggregated(self) -> bool:
        return "prefill" in self.roles

    @property
    def name(self) -> str:
        shape = self.settings["disaggregation.mode"] if self.is_disaggregated else "aggregated"
        return f"turn {self.number}, {shape}, {self.settings['router.policy']}"

    @property
    def workers(self) -> dict[str, str]:
        """The role of each worker by its name."""
        return {
            f"{role}-{1 + self.roles[:number].count(role)}": role
            for number, role in enumerate(self.roles)
        }


AGGREGATED: Final = ("aggregated",) * 3
DISAGGREGATED: Final = ("decode", "decode", "prefill", "prefill")


def policy_of(seed: int) -> str:
    """How the routers of all processes choose, for the whole run: frontends outlive turns."""
    return Random(f"{seed} policy").choice(("round_robin", "least_loaded", "power_of_two", "kv"))


def turns_of(
    seed: int, *, length_s: float, count: int, questions_max: int = QUESTIONS
) -> list[Turn]:
    """Aggregated and disaggregated workers in turns, each with faults of its own."""
    questions = tuple(questions_of(seed, min(questions_max, QUESTIONS)))
    made = []
    for number in range(1, count + 1):
        dice = Random(f"{seed} turn {number}")
        roles = AGGREGATED if number % 2 else DISAGGREGATED
        settings = {
            "router.policy": policy_of(seed),
            "disaggregation.mode": ("prefill_first", "decode_first")[(seed + number // 2) % 2],
        }
        turn = Turn(number, roles, settings, length_s, questions, ())
        if turn.is_disaggregated:
            turn = attrs.evolve(turn, questions=questions[:-CALLS])
        made.append(attrs.evolve(turn, faults=tuple(faults_of(turn, dice))))
    return made


def questions_of(seed: int, count: int) -> list[Question]:
    """Chats and completions of many lengths, then those that are answered by a call of a tool."""
    dice = Random(f"{seed} questions")
    return [
        *(_question(number, dice) for number in range(count)),
        *(_call(number, dice) for number in range(count, count + CALLS)),
    ]


def _question(number: int, dice: Random) -> Question:
    # The number first: no prompt begins as another, so none finds another's blocks.
    text = f"{number} " + " ".join(dice.choices(WORDS, k=dice.choice((4, 8, 30, 60, 90))))
    body: dict[str, Any] = {
        "model": "exact",
        "max_tokens": dice.choice((8, 40, 80, 140)),
        # Half of them sampled: whoever goes on with one draws what the first would have drawn.
        **({"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}),
    }
    if number % 3:
        body["messages"] = [{"role": "user", "content": text}]
        if not number % 10:
            body |= {"logprobs": True, "top_logprobs": 2}
    else:
        body["prompt"] = text
    return Question(number, "chat/completions" if number % 3 else "completions", body)


def _call(number: int, dice: Random) -> Question:
    text = f"{number} " + " ".join(dice.choices(WORDS, k=12))
    messages = [{"role": "user", "content": text}]
    body = {"model": CALLER, "messages": messages, "max_tokens": 200, "tools": TOOLS}
    return Question(number, "chat/completions", body)


def ask_of(turn: Turn, dice: Random) -> Ask:
    """The next thing a client does; one in six leaves before the end."""
    return Ask(
        dice.choice(turn.questions),
        is_streamed=dice.random() < 0.6,
        leaves_after_s=dice.uniform(0, 1.5) if dice.random() < 1 / 6 else None,
        pause_s=dice.uniform(0, 1),
    )


def faults_of(turn: Turn, dice: Random) -> list[Fault]:
    """One every few seconds; several may be under way at once, but one at a time to each process.

    In the last two thirds the first worker of each role is stopped at most, and so grows as old as
    a look at its memory wants. The first frontend is left alone.
    """
    made: list[Fault] = []
    busy: dict[str, float] = {}
    at_s = FIRST_FAULT_S
    while at_s < turn.length_s:
        fault = _fault(turn, dice, at_s)
        if all(busy.get(each, 0) <= at_s for each in fault.targets):
            made.append(fault)
            # Started again it needs a few seconds.
            busy |= dict.fromkeys(fault.targets, at_s + fault.away_s + 4)
        at_s += dice.uniform(1.5, 7)
    return made


def _fault(turn: Turn, dice: Random, at_s: float) -> Fault:
    is_early = at_s < turn.length_s / 3
    kind = dice.choices(("worker", "all", "frontend-2", "etcd", "nats"), (55, 7, 14, 13, 11))[0]
    act = dice.choices(tuple(Act), (45, 30, 25))[0]
    targets: Sequence[str] = (kind,)
    if kind == "all" and is_early:
        role = dice.choice(sorted(set(turn.roles)))
        targets = [name for name, its_role in turn.workers.items() if its_role == role]
    elif kind in ("worker", "all"):
        targets = (name := dice.choice(list(turn.workers)),)
        if name.endswith("-1") and not is_early:
            act = Act.STOP
    longest_s = {Act.KILL: 4.0, Act.TERMINATE: 2.0, Act.STOP: 12.0}[act]
    away_s = dice.uniform(0.2, longest_s)
    # Now and then longer than a lease, and than a request is given up after.
    if dice.random() < 0.15:
        away_s = dice.uniform(12, 28)
    return Fault(at_s, act, tuple(targets), min(away_s, max(1.0, turn.length_s / 3)))
