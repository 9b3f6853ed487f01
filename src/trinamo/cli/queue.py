"""`trinamo queue`: the work queues, and their dead letters."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trinamo.runtime.logs.text import one_line

from .options import AsJson, Sources, sources_of, takes_sources

if TYPE_CHECKING:
    from trinamo.runtime.planes import DeadLetter, EventPlane


queue_app = typer.Typer(
    name="queue",
    help="Work queues: look at them, put jobs, and handle those whose attempts are used up.",
    epilog=(
        "Examples:  trinamo queue ls  ·  trinamo queue show prefill  ·  "
        "trinamo queue requeue prefill --all"
    ),
    no_args_is_help=True,
)


def complete_queue(ctx: typer.Context, incomplete: str) -> list[str]:
    """For tab completion: the queues of the broker meant, if it answers soon."""

    async def look(events: EventPlane) -> list[str]:
        return await events.work_queue_names()

    return [name for name in _completions(ctx, look) if name.startswith(incomplete)]


def complete_job(ctx: typer.Context, incomplete: str) -> list[str]:
    """For tab completion: the dead letters of the queue that was named before."""

    async def look(events: EventPlane) -> list[str]:
        async with events.work_queue(ctx.params["queue"]) as queue:
            return [letter.id for letter in await queue.dead_letters(count_max=COMPLETIONS_MAX)]

    return [job_id for job_id in _completions(ctx, look) if job_id.startswith(incomplete)]


QueueName = Annotated[
    str,
    typer.Argument(
        metavar="QUEUE", help="Its name, as `ls` shows it.", autocompletion=complete_queue
    ),
]
JobIds = Annotated[
    list[str] | None,
    typer.Argument(metavar="JOB…", help="Ids of dead letters.", autocompletion=complete_job),
]
AllOfThem = Annotated[bool, typer.Option("--all", help="All dead letters of the queue.")]
LETTERS_MAX = 1000
PAYLOAD_SHOWN_BYTES = 4096
PAYLOAD_BYTES_MAX = 1 << 20
COMPLETIONS_MAX = 50
COMPLETION_TIMEOUT_S = 1.5
JETSTREAM_TIMEOUT_S = 3.0
JETSTREAM_POLL_S = 0.25
ADVICE = (
    "Queues are kept by JetStream: start nats-server with -js, as `trinamo up` does. A cluster of them"
    " needs most of its servers, and a few seconds to choose a new leader; then try again"
)


@queue_app.command(
    "ls", epilog="Examples:  trinamo queue ls  ·  trinamo queue ls --json --nats nats://10.0.0.5"
)
@takes_sources("nats")
def list_queues(
    *,
    as_json: AsJson = False,
    sources: Sources,
) -> None:
    """List the queues: jobs ready and leased, dead letters, age of the oldest job."""
    import attrs

    from trinamo.runtime.errors import UnavailableError

    async def look(events: EventPlane) -> list[dict[str, Any]]:
        rows = []
        for name in await events.work_queue_names():
            try:
                async with events.work_queue(name) as queue:
                    found = await queue.statistics()
                    rows.append({"queue": name, "ready": found.ready, **attrs.asdict(found)})
            except UnavailableError:
                continue  # Removed since it was listed.
        return rows

    rows = _run(look, sources)
    if as_json:
        _write_json(rows)
        return
    if not rows:
        sys.stdout.write("no queues\n")
    for row in rows:
        sys.stdout.write(
            f"{row['queue']}: {row['ready']} ready, {row['leased']} leased, {row['dead']} dead, "
            f"oldest {row['oldest_age_s']:.1f} s\n"
        )


@queue_app.command(
    "show", epilog="Examples:  trinamo queue show prefill  ·  trinamo queue show prefill JOB --json"
)
@takes_sources("nats")
def show_dead_letters(
    queue: QueueName,
    job: Annotated[
        str | None,
        typer.Argument(metavar="JOB", help="One dead letter.", autocompletion=complete_job),
    ] = None,
    *,
    as_json: AsJson = False,
    sources: Sources,
) -> None:
    """Show a queue's dead letters, or one of them with its payload; exit 1 if it is not there."""

    async def look(events: EventPlane) -> tuple[list[DeadLetter], int]:
        async with events.work_queue(queue) as opened:
            if job is None:
                letters = await opened.dead_letters(count_max=LETTERS_MAX)
                return letters, (await opened.statistics()).dead
            letter = await opened.dead_letter(job)
            return ([], 0) if letter is None else ([letter], 1)

    letters, count = _run(look, sources)
    if as_json:
        names = ("attempts", "reason", "dead_s", "payload")
        rows = [
            {"job": each.id} | {name: getattr(each, name) for name in names} for each in letters
        ]
        _write_json(rows)
    else:
        for letter in letters:
            sys.stdout.write(
                f"{one_line(letter.id)}: {letter.attempts} attempts, dead for {letter.dead_s:.0f} s: "
                f"{letter.reason!r}\n"
            )
            if job is not None:
                shown = letter.payload[:PAYLOAD_SHOWN_BYTES]
                sys.stdout.write(f"{shown.decode('utf-8', 'backslashreplace')!r}\n")
        if not letters and job is None:
            sys.stdout.write("no dead letters\n")
    if len(letters) < count:
        sys.stderr.write(f"these are the oldest {len(letters)} of {count}\n")
    if job is not None and not letters:
        _fail(f"{queue} has no dead letter {job}")


@queue_app.command(
    "put",
    epilog="Examples:  trinamo queue put jobs JOB '{\"page\": 7}'  ·  trinamo queue put jobs JOB < job.json",
)
@takes_sources("nats")
def put(
    queue: QueueName,
    job: Annotated[str, typer.Argument(metavar="JOB", help="Its id, once in the queue.")],
    payload: Annotated[
        str | None,
        typer.Argument(metavar="PAYLOAD", help="Its bytes; without it, standard input."),
    ] = None,
    *,
    sources: Sources,
) -> None:
    """Put a job into a queue that is there; one with an id that is known is not put again."""
    data = sys.stdin.buffer.read(PAYLOAD_BYTES_MAX + 1) if payload is None else payload.encode()
    if len(data) > PAYLOAD_BYTES_MAX:
        _fail(f"a payload of more than {PAYLOAD_BYTES_MAX} bytes")

    async def act(events: EventPlane) -> str:
        async with events.work_queue(queue) as opened:
            return str(await opened.put(job, data))

    sys.stdout.write(f"{queue}: {job} {_run(act, sources)}\n")


@queue_app.command(
    "requeue",
    epilog="Examples:  trinamo queue requeue prefill JOB  ·  trinamo queue requeue prefill --all",
)
@takes_sources("nats")
def requeue(
    queue: QueueName,
    jobs: JobIds = None,
    *,
    all_of_them: AllOfThem = False,
    sources: Sources,
) -> None:
    """Make dead letters jobs again, with all their attempts; exit 1 if one is not there."""
    wanted = _wanted(jobs, all_of_them)

    async def act(events: EventPlane) -> tuple[int, list[str]]:
        count = 0
        async with events.work_queue(queue) as opened:
            # One that dies again meanwhile is not taken twice: only as many as there were.
            left = len(wanted) or (await opened.statistics()).dead
            missing = []
            while left > 0:
                ids = wanted or [
                    letter.id
                    for letter in await opened.dead_letters(count_max=min(left, LETTERS_MAX))
                ]
                if not ids:
                    break
                for job_id in ids:
                    if await opened.requeue(job_id):
                        count += 1
                    else:
                        missing.append(job_id)
                left -= len(ids)
        return count, missing if wanted else []

    _tell_outcome(queue, "queued again", *_run(act, sources))


@queue_app.command(
    "purge",
    epilog="Examples:  trinamo queue purge prefill JOB  ·  trinamo queue purge prefill --all",
)
@takes_sources("nats")
def purge(
    queue: QueueName,
    jobs: JobIds = None,
    *,
    all_of_them: AllOfThem = False,
    sources: Sources,
) -> None:
    """Forget dead letters for good; exit 1 if one is not there."""
    wanted = _wanted(jobs, all_of_them)

    async def act(events: EventPlane) -> tuple[int, list[str]]:
        async with events.work_queue(queue) as opened:
            if not wanted:
                return await opened.purge_dead(), []
            missing = [job_id for job_id in wanted if not await opened.purge_dead(job_id)]
            return len(wanted) - len(missing), missing

    _tell_outcome(queue, "forgotten", *_run(act, sources))


def _wanted(jobs: list[str] | None, all_of_them: bool) -> list[str]:
    if bool(jobs) == all_of_them:
        raise typer.BadParameter("name dead letters, or give --all")
    return jobs or []


def _tell_outcome(queue: str, outcome: str, count: int, missing: list[str]) -> None:
    sys.stdout.write(f"{queue}: {count} dead letter{'' if count == 1 else 's'} {outcome}\n")
    if missing:
        _fail(f"{queue} has no dead letter {', '.join(missing)}")


def _fail(sentence: str) -> None:
    sys.stderr.write(f"trinamo: {sentence}\n")
    raise typer.Exit(1)


def _write_json(value: Any) -> None:
    """Payloads become Base64, as always where JSON meets bytes."""
    import msgspec

    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def _run(
    action: Callable[[EventPlane], Awaitable[Any]],
    sources: Sources,
    *,
    patience_s: float = math.inf,
) -> Any:
    import trio

    from trinamo.runtime.errors import DeadlineError, UnavailableError, UnknownOutcomeError
    from trinamo.transports.assembly.planes import reach_events

    from .running.locating import locate

    # What an import takes is not part of the patience with a server.
    importlib.import_module("trinamo.transports.nats")

    async def act() -> Any:
        with trio.move_on_after(patience_s):
            async with reach_events(locate(sources).config) as events:
                try:
                    await _wait_jetstream(events)
                except (DeadlineError, UnavailableError) as error:
                    raise UnavailableError(f"JetStream does not answer. {ADVICE}") from error
                try:
                    return await action(events)
                except (DeadlineError, UnknownOutcomeError) as error:
                    raise UnavailableError(f"{error.message}. {ADVICE}") from error

    return trio.run(act)


async def _wait_jetstream(events: EventPlane) -> None:
    """Find out early that nobody answers, rather than after the patience of a queue."""
    import trio

    from trinamo.runtime.errors import DeadlineError, UnavailableError

    give_up_at = trio.current_time() + JETSTREAM_TIMEOUT_S
    while True:
        try:
            await events.request("$JS.API.INFO", b"", timeout_s=JETSTREAM_POLL_S)
        except (DeadlineError, UnavailableError):
            if trio.current_time() >= give_up_at:
                raise
            await trio.sleep(JETSTREAM_POLL_S)
        else:
            return


def _completions(
    ctx: typer.Context, look: Callable[[EventPlane], Awaitable[list[str]]]
) -> list[str]:
    """What `look` finds; nothing, rather than an error or a wait, if it cannot."""
    try:
        return _run(look, sources_of(ctx.params), patience_s=COMPLETION_TIMEOUT_S) or []
    except Exception:  # noqa: BLE001 -- a shell that completes has no place for it
        return []
