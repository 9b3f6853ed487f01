"""The rows of the data path's table: what each load should reach, and what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Figures = Mapping[str, float]


class Measured:
    """Everything that one run measured, `{part: {load: {kind: figures}}}`; what is not there is None."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = parts

    def rpc(self, load: str, kind: str) -> Figures | None:
        return self.parts.get("rpc", {}).get(load, {}).get(kind)

    def http(self, load: str, kind: str) -> Figures | None:
        return self.parts.get("http", {}).get(load, {}).get(kind)

    def part(self, *names: str) -> Any:
        found: Any = self.parts
        for name in names:
            found = found.get(name) if found else None
        return found


class Row(NamedTuple):
    """One line: `shown` is asked for trinamo, for what it was before, and for every peer."""

    load: str
    target: str
    shown: Callable[[Measured, str], str]
    peers: tuple[str, ...]
    reached: Callable[[Measured], str] = lambda _: ""
    """The figures that the target is about, and whether they are in it."""


def verdict(is_reached: bool, text: str) -> str:
    return f"{text}: {'reached' if is_reached else '**not reached**'}"


# --- what is shown of a load -----------------------------------------------------------------------


def rpc_requests(load: str) -> Callable[[Measured, str], str]:
    def shown(measured: Measured, kind: str) -> str:
        found = measured.rpc(load, kind)
        if found is None:
            return "–"
        return f"{found['worker']:.0f} + {found['client']:.0f} µs, {found['rate']:,.0f}/s"

    return shown


def rpc_items(load: str) -> Callable[[Measured, str], str]:
    def shown(measured: Measured, kind: str) -> str:
        found = measured.rpc(load, kind)
        return "–" if found is None else f"{found['worker']:.1f} + {found['client']:.1f} µs"

    return shown


def sides(found: Figures, digits: int) -> str:
    """Frontend and worker; one figure for a server that is both."""
    worker = found["sum_us"] - found["frontend_us"]
    if worker < 0.05:
        return f"{found['frontend_us']:.{digits}f}"
    return f"{found['frontend_us']:.{digits}f} + {worker:.{digits}f}"


def http_requests(load: str) -> Callable[[Measured, str], str]:
    def shown(measured: Measured, kind: str) -> str:
        found = measured.http(load, kind)
        return "–" if found is None else f"{sides(found, 0)} µs, {found['rate']:,.0f}/s"

    return shown


def http_tokens(load: str, *, with_gaps: bool = True) -> Callable[[Measured, str], str]:
    def shown(measured: Measured, kind: str) -> str:
        found = measured.http(load, kind)
        if found is None:
            return "–"
        text = f"{sides(found, 1)} µs"
        return f"{text}, ITL p99 {found['itl_p99_ms']:.1f} ms" if with_gaps else text

    return shown


def first_tokens(measured: Measured, kind: str) -> str:
    found = measured.http("steps256", kind)
    return "–" if found is None else f"{found['ttft_p50_ms']:.0f} ms"


def open_streams(measured: Measured, kind: str) -> str:
    found = measured.http("open5000", kind)
    if found is None:
        return "–"
    steady = [value for key, value in found.items() if key.endswith("_steady_us")]
    cost = " + ".join(f"{value:.1f}" for value in steady if value >= 0.05) or sides(found, 1)
    wrong = found["errors"] + found["missing"]
    return f"{wrong:.0f} errors, {found['frontend_rss_mb']:.0f} MB, {cost} µs"


def loop_lag(measured: Measured, kind: str) -> str:
    lags = [
        f"{found['lag_p99_ms']:.1f}"
        for load in ("unary64", "steps64", "steps256", "burst", "open5000")
        if (found := measured.http(load, kind)) and "lag_p99_ms" in found
    ]
    return " / ".join(lags) + " ms" if lags else "–"


def stalled(measured: Measured, kind: str) -> str:
    found = measured.part("isolation", "stalled")
    if found is None or kind != "trinamo":
        return "–"
    return (
        f"{found['alone_p99_ms']:.2f} and {found['beside_p99_ms']:.2f} ms ({found['change']:+.1%})"
    )


def deaths(victim: str) -> Callable[[Measured, str], str]:
    def shown(measured: Measured, kind: str) -> str:
        found = measured.part("isolation", "deaths", victim)
        if found is None or kind != "trinamo":
            return "–"
        return f"p50 {found['p50']:.0f}, all after {found['max']:.0f} ms"

    return shown


# --- what is reached -------------------------------------------------------------------------------


def one_item(measured: Measured) -> str:
    ours, theirs = measured.rpc("one", "trinamo"), measured.rpc("one", "dynamo")
    if not ours or not theirs:
        return ""
    worker, client, rate = (ours[key] / theirs[key] for key in ("worker", "client", "rate"))
    is_reached = worker <= 0.4 and client <= 0.4 and rate >= 2
    return verdict(is_reached, f"{worker:.2f} ×, {client:.2f} ×, {rate:.2f} ×")


def stepped_items(measured: Measured) -> str:
    ours = measured.rpc("pushed", "trinamo")
    if not ours:
        return ""
    return verdict(max(ours["worker"], ours["client"]) <= 8, "")


def unary(measured: Measured) -> str:
    ours, theirs = measured.http("unary64", "trinamo"), measured.http("unary64", "dynamo")
    bare = measured.http("unary64", "uvicorn")
    if not ours or not theirs or not bare:
        return ""
    frontend = ours["frontend_us"] / theirs["frontend_us"]
    worker = (ours["sum_us"] - ours["frontend_us"]) / (theirs["sum_us"] - theirs["frontend_us"])
    rate, edge = ours["rate"] / theirs["rate"], ours["frontend_us"] / bare["frontend_us"]
    is_reached = frontend <= 0.4 and worker <= 0.4 and rate >= 2 and edge <= 3
    text = f"{frontend:.2f} ×, {worker:.2f} ×, {rate:.2f} ×; {edge:.1f} × uvicorn"
    return verdict(is_reached, text)


def together(load: str, gap_ms: float) -> Callable[[Measured], str]:
    def reached(measured: Measured) -> str:
        ours = measured.http(load, "trinamo")
        if not ours:
            return ""
        frontend, worker = ours["frontend_us"], ours["sum_us"] - ours["frontend_us"]
        routers = [measured.http(load, kind) for kind in ("sglang", "vllm")]
        is_below = all(frontend < each["frontend_us"] for each in routers if each)
        is_reached = frontend <= 20 and worker <= 10 and ours["itl_p99_ms"] <= gap_ms and is_below
        return verdict(is_reached, "")

    return reached


def by_itself(load: str) -> Callable[[Measured], str]:
    def reached(measured: Measured) -> str:
        ours, theirs = measured.http(load, "trinamo"), measured.http(load, "dynamo")
        if not ours or not theirs:
            return ""
        ratio = ours["sum_us"] / theirs["sum_us"]
        return verdict(ratio <= 0.6, f"{ratio:.2f} ×")

    return reached


def first(measured: Measured) -> str:
    ours, theirs = measured.http("steps256", "trinamo"), measured.http("steps256", "dynamo")
    if not ours or not theirs:
        return ""
    return verdict(ours["ttft_p50_ms"] <= theirs["ttft_p50_ms"], "")


def bursts(read: Callable[[Measured, str], Figures | None]) -> Callable[[Measured], str]:
    def reached(measured: Measured) -> str:
        ours, before = read(measured, "trinamo"), read(measured, "before")
        if not ours or not before:
            return ""
        key = "sum_us" if "sum_us" in ours else None
        now, then = (
            each[key] if key else each["worker"] + each["client"] for each in (ours, before)
        )
        return verdict(now <= 1.1 * then, f"{now / then:.2f} ×")

    return reached


def many_open(measured: Measured) -> str:
    ours = measured.http("open5000", "trinamo")
    if not ours:
        return ""
    is_whole = not (ours["errors"] or ours["missing"] or ours["lost"])
    return verdict(is_whole and ours["frontend_rss_mb"] <= 300, "")


def lag(measured: Measured) -> str:
    found = [
        each["lag_p99_ms"]
        for load in ("unary64", "steps64", "steps256", "burst", "open5000")
        if (each := measured.http(load, "trinamo")) and "lag_p99_ms" in each
    ]
    return verdict(max(found) <= 10, f"most {max(found):.1f} ms") if found else ""


def isolated(measured: Measured) -> str:
    found = measured.part("isolation", "stalled")
    return verdict(found["change"] < 0.05, "") if found else ""


def noticed(victim: str) -> Callable[[Measured], str]:
    def reached(measured: Measured) -> str:
        found = measured.part("isolation", "deaths", victim)
        return verdict(found["max"] <= 50, "") if found else ""

    return reached


ROUTERS = ("dynamo", "sglang", "vllm", "uvicorn", "floor")
ROWS = (
    Row(
        "RPC stream of one item, 64 at once: worker + caller per request",
        "≤ 0.4 × Dynamo's on both sides, ≥ 2 × its rate",
        rpc_requests("one"),
        ("dynamo", "grpc"),
        one_item,
    ),
    Row(
        "RPC items of an engine that steps 64 streams together, sink to sink: worker + caller",
        "≤ 8 µs on each side",
        lambda measured, kind: rpc_items("pushed" if kind == "trinamo" else "steps")(
            measured, kind
        ),
        ("dynamo", "grpc"),
        stepped_items,
    ),
    Row(
        "the same, generator to iterator",
        "",
        rpc_items("steps"),
        ("dynamo", "grpc"),
    ),
    Row(
        "RPC items in bursts, 64 streams: worker + caller",
        "≤ 1.1 × before",
        rpc_items("free"),
        ("dynamo", "grpc"),
        bursts(lambda measured, kind: measured.rpc("free", kind)),
    ),
    Row(
        "HTTP unary, 64 at once: frontend + worker per request",
        "≤ 0.4 × Dynamo's each, ≥ 2 × its rate; frontend ≤ 3 × uvicorn's",
        http_requests("unary64"),
        ROUTERS,
        unary,
    ),
    Row(
        "64 SSE streams at 20 ms, tokens of a step together: frontend + worker per token",
        "≤ 20 + 10 µs, below the routers; ITL p99 ≤ 22 ms",
        http_tokens("steps64"),
        ROUTERS,
        together("steps64", 22),
    ),
    Row(
        "the same, 256 streams",
        "≤ 20 + 10 µs, below the routers; ITL p99 ≤ 24 ms",
        http_tokens("steps256"),
        ROUTERS,
        together("steps256", 24),
    ),
    Row(
        "64 streams at 20 ms, every handler sleeping by itself",
        "≤ 0.6 × Dynamo's sum",
        http_tokens("sleeps64"),
        ("dynamo",),
        by_itself("sleeps64"),
    ),
    Row(
        "the same, 256 streams",
        "≤ 0.6 × Dynamo's sum",
        http_tokens("sleeps256"),
        ("dynamo",),
        by_itself("sleeps256"),
    ),
    Row("TTFT p50 when 256 arrive together", "≤ Dynamo's", first_tokens, ROUTERS, first),
    Row(
        "bursts over HTTP, 64 streams: frontend + worker per token",
        "≤ 1.1 × before",
        http_tokens("burst", with_gaps=False),
        ROUTERS,
        bursts(lambda measured, kind: measured.http("burst", kind)),
    ),
    Row(
        "5,000 open SSE streams at 5 tokens/s each on one frontend",
        "no error, RSS ≤ 300 MB",
        open_streams,
        (),
        many_open,
    ),
    Row(
        "event-loop lag of the frontend, p99: unary, 64, 256, bursts, 5,000",
        "≤ 10 ms",
        loop_lag,
        (),
        lag,
    ),
    Row(
        "one stream whose consumer does not read: ITL p99 of 64 others without and with it",
        "< 5 % more",
        stalled,
        (),
        isolated,
    ),
    Row(
        "caller killed with -9 under 256 streams: handlers cancelled",
        "≤ 50 ms",
        deaths("caller"),
        (),
        noticed("caller"),
    ),
    Row(
        "worker killed with -9 under 256 streams: typed errors",
        "≤ 50 ms",
        deaths("worker"),
        (),
        noticed("worker"),
    ),
)
NAMES = {
    "dynamo": "Dynamo",
    "grpc": "grpc.aio",
    "sglang": "sglang-router",
    "vllm": "vllm-router",
    "uvicorn": "uvicorn",
    "floor": "bare trio",
}


def table(measured: Measured) -> str:
    """Markdown; a cell for each peer that was measured."""
    lines = [
        "| load | target | before | now | | peers in the same run |",
        "|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        peers = [
            f"{NAMES[kind]} {shown}"
            for kind in row.peers
            if (shown := row.shown(measured, kind)) != "–"
        ]
        before, now = (row.shown(measured, kind) for kind in ("before", "trinamo"))
        reached = row.reached(measured).removeprefix(": ")
        lines.append(
            f"| {row.load} | {row.target} | {before} | {now} | {reached} | {'; '.join(peers)} |"
        )
    return "\n".join(lines)
