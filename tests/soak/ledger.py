"""What became of everything in a soak: counted, and the red ones kept with all that is known of them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, Final

import attrs
import msgspec

from tests.soak.asking import RED, Answer, Outcome
from tests.soak.plan import Question

SHOWN: Final = 12
"""Red outcomes that the end of a run prints; all are in the file."""
_NUMBER: Final = re.compile(r"\b[0-9a-f]{8,}\b|soak-[-\w]+|\d+")
KINDS: Final = ("whole", "streamed")


@attrs.define
class Ledger:
    """Counts by outcome and kind, findings, and the time line of faults."""

    out: Path
    counts: Counter[tuple[Outcome, str]] = attrs.field(factory=Counter)
    reasons: Counter[tuple[Outcome, str]] = attrs.field(factory=Counter)
    """Of those that are not right, what the server said."""
    findings: list[str] = attrs.field(factory=list)
    """What else must not happen, one sentence each."""
    events: list[tuple[float, str]] = attrs.field(factory=list)
    red: list[str] = attrs.field(factory=list)
    refused_longest_s: float = 0.0

    def note(self, at_s: float, text: str) -> None:
        """An event that explains outcomes: a fault, or its end."""
        self.events.append((at_s, text))
        with (self.out / "events.txt").open("a", encoding="utf-8") as file:
            file.write(f"{at_s:8.2f} {text}\n")

    def find(self, at_s: float, text: str) -> None:
        """Something that must not happen."""
        self.findings.append(text)
        self.note(at_s, f"FOUND: {text}")

    def add(
        self,
        outcome: Outcome,
        *,
        question: Question,
        is_streamed: bool,
        answer: Answer,
        whole: Answer,
        facts: dict[str, Any],
    ) -> None:
        """Count one request; `facts` say when it was, and who was asked."""
        self.counts[outcome, KINDS[is_streamed]] += 1
        if outcome in (Outcome.RIGHT, Outcome.LEFT):
            return
        said = answer.error or answer.broken or "nothing"
        self.reasons[outcome, _reason(said)] += 1
        kept = {
            "outcome": outcome,
            **facts,
            "streamed": is_streamed,
            "question": question.number,
            "said": said,
            "answer": attrs.asdict(answer),
            "whole": attrs.asdict(whole),
        }
        with (self.out / "outcomes.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(kept) + b"\n")
        if outcome in RED:
            self.red.append(
                f"{outcome}: {facts['request_id']} at {facts['began_s']:.1f}-{facts['ended_s']:.1f} s,"
                f" {facts['frontend']}, {KINDS[is_streamed]}, status {answer.status},"
                f" {len(answer.text)} of {len(whole.text)} characters, said: {said[:200]}"
            )

    def count(self, *outcomes: Outcome) -> int:
        return sum(n for (outcome, _), n in self.counts.items() if outcome in outcomes)

    @property
    def is_red(self) -> bool:
        return bool(self.count(*RED) or self.findings)

    def line(self) -> str:
        """All outcomes so far, for the progress lines."""
        there = [(each, self.count(each)) for each in Outcome]
        return ", ".join(f"{n:,} {each}" for each, n in there if n) or "nothing yet"

    def table(self) -> list[str]:
        """Outcomes by kind, and what was said where it was not a whole answer."""
        lines = [f"{'outcome':<28}{'whole':>8}{'streamed':>10}   "]
        for each in Outcome:
            whole, streamed = (self.counts[each, kind] for kind in KINDS)
            mark = "  <-- must be 0" if each in RED and whole + streamed else ""
            lines.append(f"{each:<28}{whole:>8,}{streamed:>10,}{mark}")
        for (outcome, said), n in self.reasons.most_common(SHOWN):
            lines.append(f"  {n:>5,} × {outcome}: {said}")
        return lines


def error_lines(folder: Path) -> Counter[str]:
    """What the processes' logs say at `error`, which is what is ours to mend; without numbers."""
    found: Counter[str] = Counter()
    for path in sorted(folder.glob("*.log")):
        for line in path.read_text("utf-8", errors="replace").splitlines():
            if '"level": "error"' in line:
                event = str(json.loads(line)["event"])
                found[re.sub(r"[0-9a-f]{8,}|\d+", "N", event)[:200]] += 1
    return found


def _reason(said: str) -> str:
    """What was said, without ids and addresses: those of one kind are counted together."""
    try:
        error = json.loads(said)
    except ValueError:
        return said[:100]
    message = _NUMBER.sub("N", str(error.get("message")))
    return f"{error.get('code')}: {message[:100]}"
