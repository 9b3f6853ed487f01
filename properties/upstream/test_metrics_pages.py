"""The load on a page of metrics, whatever else stands on it."""

from __future__ import annotations

from hypothesis import example, given, strategies as st

from trinamo.runtime.planes.upstreams import Load
from trinamo.transports.openai.watch import parse_load

NAMES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_running_total",
)
numbers = st.one_of(
    st.integers(-3, 10**12).map(str),
    st.floats().map(str),
    st.sampled_from(["NaN", "+Inf", "", "x"]),
)
labels = st.sampled_from(["", '{model_name="m"}', "{", "}", '{a="{"}', '{engine="0",a="vllm:"}'])
lines = st.one_of(
    st.builds("{}{}{}{}{}".format, st.sampled_from(["", " ", "# HELP "]), st.sampled_from(NAMES),
              labels, st.sampled_from([" ", "\t", "", "  "]), numbers),
    st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=20),
)  # fmt: skip


def told(lines: list[str], name: str) -> int | None:
    """As a person reads it, line by line."""
    found = []
    for line in lines:
        rest = line.removeprefix(name)
        if rest == line:
            continue
        if rest.startswith("{"):
            rest = rest.partition("}")[2]
        if not rest.startswith((" ", "\t")):
            continue
        try:
            number = float(rest.encode().split(None, 1)[0])
        except (ValueError, IndexError):
            continue
        if 0 <= number < 1e9:
            found.append(number)
    return int(sum(found)) if found else None


@given(st.lists(lines, max_size=12), st.booleans())
@example(["vllm:num_requests_running"], False)
@example(['vllm:num_requests_running{a="b"} 2 1700000000'], True)
def test_what_a_page_tells_is_what_its_lines_tell(lines: list[str], ends: bool) -> None:
    """Each sensible sample of a gauge counts once; comments, other names and nonsense do not."""
    page = "\n".join(lines) + ("\n" if ends else "")
    running, waiting = told(lines, NAMES[0]), told(lines, NAMES[1])

    expected = None if running is waiting is None else Load(running or 0, waiting or 0)
    assert parse_load(page.encode()) == expected
