"""`trinamo sim`: the real cluster under a virtual clock, broken on purpose, replayed exactly.

Exit codes: 0 no rule was broken, 1 one was, 2 the usage or a file is wrong, 3 a run is not a
function of its seed or does not replay, 4 simulated code reached for the real world.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from .files import (
    EXIT_BROKEN,
    EXIT_UNSTEADY,
    catalogue_names,
    complete_scenario,
    draw,
    exit_code_for,
    open_failure,
    play_again,
    play_test_again,
    refuse,
    resolve,
    save_played,
    scenario_of,
    seeds_of,
    write_file,
)
from .text import hint_lines, hints_for, pin_lines, quietly, row_text, run_lines, say, title_of

if TYPE_CHECKING:
    from trinamo.sim.explore import Played, Scenario


sim = typer.Typer(
    name="sim",
    help="Run the real cluster under a virtual clock, break it on purpose, replay every failure.",
    epilog=(
        "Examples:  trinamo sim list  ·  trinamo sim run worker_dies --html run.html  ·  "
        "trinamo sim swarm storm --seeds 1..200 -j 2  ·  trinamo sim replay failure.json"
    ),
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TEMPLATE: Final = Path(__file__).parent / "template"
"""Kept as text: no part of this program, and Python only where it is written to."""
PolicyName = Literal["batch", "choice", "fifo", "grouped", "pct", "step"]
StreamsName = Literal["multiplexed", "dedicated"]

File = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="A scenario file, FILE.py::FUNCTION, or the name of a shipped one.",
        autocompletion=complete_scenario,
    ),
]
Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE]…",
        help="As FILE of `run`; all scenarios that ship if none is given.",
        autocompletion=complete_scenario,
    ),
]
FailFile = Annotated[Path, typer.Argument(metavar="FAIL.json", help="A failure file.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Which run of the scenario.")]
PolicyOption = Annotated[
    PolicyName | None,
    typer.Option("--policy", help="How tasks are scheduled, in place of the file's own."),
]
StreamsOption = Annotated[
    StreamsName | None,
    typer.Option("--streams", help="What streams travel on, in place of what the file says."),
]
Bug = Annotated[
    str, typer.Option("--bug", metavar="NAME", help="Plant a known mistake, as the mutants do.")
]
Html = Annotated[Path | None, typer.Option("--html", metavar="OUT", help="Draw the run here.")]
Loose = Annotated[
    bool,
    typer.Option("--loose", help="Go on if versions or rows are not those that were recorded."),
]


def command(name: str, examples: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command; the examples stand at the end of its help.

    What is no scenario, or breaks before it has a world, is a sentence and exit code 2.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def run(*arguments: Any, **options: Any) -> None:
            try:
                function(*arguments, **options)
            except ValueError as error:
                from trinamo.sim.explore import BadScenario

                if not isinstance(error, BadScenario):
                    raise
                refuse(str(error))

        return sim.command(name, epilog=f"Examples:  {examples}")(run)

    return register


def _played(play: Scenario, choices: Any) -> tuple[Played, float]:
    """A run, and its processor time."""
    import time

    from trinamo.sim.explore import played

    started_s = time.process_time()
    with quietly():
        result = played(play, choices, to_draw=True)
    return result, time.process_time() - started_s


def _finish(played: Played) -> None:
    finding = played.run.finding
    raise typer.Exit(exit_code_for(finding.invariant if finding else None))


@command(
    "run",
    "trinamo sim run kill  ·  trinamo sim run storm --seed 7 --html storm.html  ·  "
    "trinamo sim run register.py::stale_read --seed 1",
)
def run_command(
    file: File,
    *,
    seed: Seed = 0,
    policy: PolicyOption = None,
    streams: StreamsOption = None,
    bug: Bug = "",
    html: Html = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FAIL.json", help="Keep a failure to replay.")
    ] = None,
) -> None:
    """Play one scenario once and judge it."""
    play = scenario_of(file, bug=bug, policy=policy, streams=streams)
    played, cpu_s = _played(play, seed)
    title = title_of(play, seed)
    say(*run_lines(title, played.run, cpu_s), *hint_lines(hints_for(play, played.run)))
    draw(html, title, played)
    if played.run.finding is not None and save is not None:
        save_played(play, played, save)
        say(f"To replay it: trinamo sim replay {save}")
    elif played.run.finding is not None:
        say("To keep it for a replay, run it again with --save FAIL.json.")
    _finish(played)


@command(
    "swarm",
    "trinamo sim swarm --seeds 1..200  ·  trinamo sim swarm storm kill --minutes 5 -j 2  ·  "
    "trinamo sim swarm s10_stale_ack --bug stale_ack --out failures",
)
def swarm_command(
    files: Files = None,
    *,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="A..B", help="Which seeds; 1..200 by default.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", min=0.001, help="Play new seeds for so long, shared evenly."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "-j",
            "--jobs",
            min=1,
            max=256,
            help="Processes; one a core if it takes longer than a moment.",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where failure files go.")
    ] = Path("failures"),
    policy: PolicyOption = None,
    streams: StreamsOption = None,
    bug: Bug = "",
) -> None:
    """Play many seeds; keep one failure file for each rule that was broken in its own way."""
    if seeds is not None and minutes is not None:
        refuse("give --seeds or --minutes, not both")
    from .swarm import search

    plays = [
        scenario_of(name, bug=bug, policy=policy, streams=streams)
        for name in files or catalogue_names()
    ]
    span = seeds_of("1..200" if seeds is None else seeds) if minutes is None else None
    raise typer.Exit(search(plays, span, minutes, jobs=jobs, out=out))


@command(
    "replay",
    "trinamo sim replay failures/kill-7.json --html kill.html  ·  "
    "trinamo sim replay failure.json --until 0.5",
)
def replay_command(
    failure: FailFile,
    *,
    html: Html = None,
    until: Annotated[
        float | None,
        typer.Option("--until", metavar="T", min=0.0, help="Print what happens up to this second."),
    ] = None,
    loose: Loose = False,
) -> None:
    """Play a failure again and check that every row is as recorded; that of a test in pytest."""
    is_plain = html is None and until is None
    if is_plain and (code := play_test_again(failure)) is not None:
        raise typer.Exit(code)
    recorded, played, is_exact = play_again(failure, is_loose=loose)
    title = title_of(recorded.scenario, recorded.seed)
    if until is not None:
        for row in played.trace.rows:
            if row.time_s <= until and row.kind != "step":
                say(row_text(row))
    say(*run_lines(title, played.run, 0.0), *hint_lines(played.run.hints))
    say("Every row is as recorded." if is_exact else "The replay is not the recorded run.")
    draw(html, title, played, until_s=until)
    _finish(played)


@command("html", "trinamo sim html failures/kill-7.json kill.html")
def html_command(
    failure: FailFile,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The page to write.")],
    *,
    loose: Loose = False,
) -> None:
    """Draw a failure: one page that needs no other file."""
    from trinamo.sim.explore import page_of

    recorded, played, _ = play_again(failure, is_loose=loose)
    text = page_of(title_of(recorded.scenario, recorded.seed), played)
    write_file(out, text)
    say(f"{out}: {len(text.encode()):,} bytes")


@command(
    "shrink", "trinamo sim shrink failure.json  ·  trinamo sim shrink failure.json -o small.json"
)
def shrink_command(
    failure: FailFile,
    *,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="OUT", help="By default FAIL.small.json."),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="At most so much processor time.")
    ] = 60.0,
) -> None:
    """Find a failing run that is as dull as can be: fewer faults, fewer decisions."""
    from .swarm import make_dull

    recorded = open_failure(failure)
    target = out or failure.with_suffix(".small.json")
    raise typer.Exit(make_dull(recorded, target, seconds))


@command(
    "explore",
    "trinamo sim explore s10_stale_ack --max-dev 2  ·  "
    "trinamo sim explore s10_stale_ack --bug stale_ack --max-dev 1  ·  "
    "trinamo sim explore register.py --without 'jitter*' --without 'tear*' --max-dev 2",
)
def explore_command(
    file: File,
    *,
    max_dev: Annotated[
        int,
        typer.Option("--max-dev", min=0, max=20, help="How many decisions may not be the default."),
    ] = 1,
    runs_max: Annotated[
        int, typer.Option("--runs-max", min=1, help="Give up after so many.")
    ] = 100_000,
    labels: Annotated[
        list[str] | None,
        typer.Option(
            "--labels",
            metavar="NAME",
            help="Vary only these decisions; may be a pattern, repeatable.",
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", metavar="NAME", help="Do not vary these decisions; as --labels."),
    ] = None,
    policy: PolicyOption = None,
    streams: StreamsOption = None,
    bug: Bug = "",
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FAIL.json", help="Keep the first failure.")
    ] = None,
) -> None:
    """Play every run that deviates from the default run in at most N decisions; say if that was all."""
    from .swarm import explore_all

    play = scenario_of(file, bug=bug, policy=policy, streams=streams)
    code = explore_all(play, max_dev, runs_max, save, labels=labels or (), without=without or ())
    raise typer.Exit(code)


@command("pin", "trinamo sim pin failure.json  ·  trinamo sim pin failure.json --runs 30")
def pin_command(
    failure: FailFile,
    *,
    points: Annotated[int, typer.Option("--points", min=1, max=1000, help="Places tried.")] = 20,
    runs: Annotated[int, typer.Option("--runs", min=1, max=10_000, help="Endings from each.")] = 10,
) -> None:
    """Show when the failure became inevitable, by trying other endings from many places."""
    from trinamo.sim.explore import pin

    recorded, played, _ = play_again(failure)
    with quietly():
        try:
            found = pin(recorded.scenario, played.run, points=points, runs=runs)
        except ValueError as error:
            refuse(str(error))
    say(*pin_lines(found))


@command(
    "diff",
    "trinamo sim diff failure.json failure.small.json  ·  trinamo sim diff kill@1 kill@2 --html both.html",
)
def diff_command(
    left: Annotated[str, typer.Argument(metavar="A", help="A failure file, or SCENARIO@SEED.")],
    right: Annotated[str, typer.Argument(metavar="B", help="As A.")],
    *,
    html: Html = None,
) -> None:
    """Show the first row in which two runs differ; exit 1 if they do. The picture has both side by side."""
    from trinamo.sim import diff

    runs = (_either(left), _either(right))
    difference = diff(runs[0].trace, runs[1].trace)
    if difference is None:
        say(f"The runs are the same: {runs[0].run.rows} rows, digest {runs[0].run.digest}.")
        return
    lines = [f"  {row_text(row)}" for row in difference.before]
    for sign, either in (("<", difference.left), (">", difference.right)):
        lines.append(f"{sign} {'the run has ended' if either is None else row_text(either)}")
    lines.append(f"The first difference is row {difference.number}.")
    say(*lines)
    if html is not None:
        from trinamo.sim.explore import page_of
        from trinamo.sim.report import pair

        start_s = max(row.time_s for row in (difference.left, difference.right) if row is not None)
        pages = [
            page_of(name, run, start_s=start_s)
            for name, run in zip((left, right), runs, strict=True)
        ]
        write_file(html, pair((left, right), (pages[0], pages[1]), "\n".join(lines)))
        say(f"The picture is in {html}.")
    raise typer.Exit(EXIT_BROKEN)


def _either(name: str) -> Played:
    scenario, at, seed = name.rpartition("@")
    if at and seed.isdecimal() and not Path(name).is_file():
        return _played(scenario_of(scenario), int(seed))[0]
    return play_again(Path(name), is_loose=True)[1]


@command(
    "check-determinism",
    "trinamo sim check-determinism  ·  trinamo sim check-determinism storm --seeds 1..5",
)
def check_determinism_command(
    files: Files = None,
    *,
    seeds: Annotated[str, typer.Option("--seeds", metavar="A..B", help="Which seeds.")] = "1..2",
    python: Annotated[
        list[str] | None,
        typer.Option(
            "--python", metavar="PATH", help="Another interpreter to compare. Repeatable."
        ),
    ] = None,
) -> None:
    """Play each seed twice in three processes with different hash seeds; all digests must agree."""
    from .swarm import compare_digests

    plays = [scenario_of(name) for name in files or catalogue_names()]
    unsteady = compare_digests(plays, seeds_of(seeds), python or [])
    raise typer.Exit(EXIT_UNSTEADY if unsteady else 0)


@command("conform", "trinamo sim conform kill  ·  trinamo sim conform worker_dies --seeds 1..20")
def conform_command(
    file: File,
    *,
    seed: Seed = 0,
    seeds: Annotated[
        str,
        typer.Option("--seeds", metavar="A..B", help="Simulated runs that show what may happen."),
    ] = "0..39",
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, max=3600.0, help="Real seconds at most.")
    ] = 120.0,
) -> None:
    """Play the scenario on real loopback sockets in real time; the notes must be the simulator's."""
    from .swarm import compare_with_kernel

    resolve(file)
    raise typer.Exit(compare_with_kernel(scenario_of(file), seed, seeds_of(seeds), timeout))


@command("list", "trinamo sim list")
def list_command() -> None:
    """The scenarios that ship: name, what they cover, what they are about."""
    from .swarm import catalogue_table

    catalogue_table()


@command("new", "trinamo sim new counter  ·  cd counter && trinamo sim swarm scenario.py")
def new_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that is new or empty.")],
) -> None:
    """Write a small protocol of your own: its scenario, its test, a README."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            refuse(f"{folder} is not empty; name a folder that is new")
        for source in sorted(TEMPLATE.iterdir()):
            target = folder / source.name.removesuffix(".txt")
            target.write_text(source.read_text("utf-8"), "utf-8")
            say(str(target))
    except OSError as error:
        refuse(f"{folder} cannot be written: {error.strerror}")
    say(f"Try: cd {shlex.quote(str(folder))} && trinamo sim swarm scenario.py --seeds 0..200")
