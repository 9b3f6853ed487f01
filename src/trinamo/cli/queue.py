"""`trinamo queue`: the work queues, and their dead letters."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import ConfigFile, NatsServers, Preset, Settings, Sources, gather

if TYPE_CHECKING:
    from trinamo.runtime.planes import DeadLetter, EventPlane

__all__ = ["queue_app"]

queue_app = typer.Typer(
    name="queue",
    help="Work queues: depth and age, and jobs whose attempts are used up.",
    no_args_is_help=True,
)
QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="Its name, as `ls` shows it.")]
JobIds = Annotated[list[str] | None, typer.Argument(metavar="JOB…", help="Ids of dead letters.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]
AllOfThem = Annotated[bool, typer.Option("--all", help="All dead letters of the queue.")]
LETTERS_MAX = 1000
PAYLOAD_SHOWN_BYTES = 4096


@queue_app.command("ls")
def list_queues(
    *,
    as_json: AsJson = False,
    nats: NatsServers = None,
    config: ConfigFile = None,
    preset: Preset = None,
    settings: Settings = None,
) -> None:
    """List the queues: jobs waiting and taken, dead letters, age of the oldest job."""
    import attrs

    async def look(events: EventPlane) -> list[dict[str, Any]]:
        rows = []
        for name in await events.work_queue_names():
            async with events.work_queue(name) as queue:
                rows.append({"queue": name, **attrs.asdict(await queue.statistics())})
        return rows

    rows = _run(look, nats, config, preset, settings)
    if as_json:
        _write_json(rows)
        return
    if not rows:
        sys.stdout.write("no queues\n")
    for row in rows:
        sys.stdout.write(
            f"{row['queue']}: {row['depth']} jobs, {row['leased']} of them taken, "
            f"oldest {row['oldest_age_s']:.1f} s, {row['dead']} dead\n"
        )


@queue_app.command("show")
def show_dead_letters(
    queue: QueueName,
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="One dead letter.")] = None,
    *,
    as_json: AsJson = False,
    nats: NatsServers = None,
    config: ConfigFile = None,
    preset: Preset = None,
    settings: Settings = None,
) -> None:
    """Show a queue's dead letters, or one of them with its payload; exit 1 if it is not there."""

    async def look(events: EventPlane) -> list[DeadLetter]:
        async with events.work_queue(queue) as opened:
            if job is None:
                return await opened.dead_letters(count_max=LETTERS_MAX)
            letter = await opened.dead_letter(job)
            return [] if letter is None else [letter]

    letters = _run(look, nats, config, preset, settings)
    if as_json:
        _write_json([_letter_row(letter) for letter in letters])
    else:
        for letter in letters:
            sys.stdout.write(
                f"{letter.id}: {letter.attempts} attempts, dead for {letter.dead_s:.0f} s: "
                f"{letter.reason!r}\n"
            )
            if job is not None:
                shown = letter.payload[:PAYLOAD_SHOWN_BYTES]
                sys.stdout.write(f"{shown.decode('utf-8', 'backslashreplace')!r}\n")
        if not letters and job is None:
            sys.stdout.write("no dead letters\n")
    if job is not None and not letters:
        _fail(f"{queue} has no dead letter {job}")


@queue_app.command("requeue")
def requeue(
    queue: QueueName,
    jobs: JobIds = None,
    *,
    all_of_them: AllOfThem = False,
    nats: NatsServers = None,
    config: ConfigFile = None,
    preset: Preset = None,
    settings: Settings = None,
) -> None:
    """Make dead letters jobs again, with all their attempts; exit 1 if one is not there."""
    wanted = _wanted(jobs, all_of_them)

    async def act(events: EventPlane) -> list[str]:
        async with events.work_queue(queue) as opened:
            ids = wanted or [each.id for each in await opened.dead_letters(count_max=LETTERS_MAX)]
            return [job_id for job_id in ids if not await opened.requeue(job_id)]

    _tell_missing(queue, _run(act, nats, config, preset, settings))


@queue_app.command("purge")
def purge(
    queue: QueueName,
    jobs: JobIds = None,
    *,
    all_of_them: AllOfThem = False,
    nats: NatsServers = None,
    config: ConfigFile = None,
    preset: Preset = None,
    settings: Settings = None,
) -> None:
    """Forget dead letters for good; exit 1 if one is not there."""
    wanted = _wanted(jobs, all_of_them)

    async def act(events: EventPlane) -> list[str]:
        async with events.work_queue(queue) as opened:
            if not wanted:
                await opened.purge_dead()
            return [job_id for job_id in wanted if not await opened.purge_dead(job_id)]

    _tell_missing(queue, _run(act, nats, config, preset, settings))


def _wanted(jobs: list[str] | None, all_of_them: bool) -> list[str]:
    if bool(jobs) == all_of_them:
        raise typer.BadParameter("name dead letters, or give --all")
    return jobs or []


def _tell_missing(queue: str, missing: list[str]) -> None:
    if missing:
        _fail(f"{queue} has no dead letter {', '.join(missing)}")


def _fail(sentence: str) -> None:
    sys.stderr.write(f"trinamo: {sentence}\n")
    raise typer.Exit(1)


def _letter_row(letter: DeadLetter) -> dict[str, Any]:
    return {
        "job": letter.id,
        "attempts": letter.attempts,
        "reason": letter.reason,
        "dead_s": letter.dead_s,
        "payload": letter.payload,
    }


def _write_json(value: Any) -> None:
    """Payloads become Base64, as always where JSON meets bytes."""
    import msgspec

    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def _run(
    action: Callable[[EventPlane], Awaitable[Any]],
    nats: str | None,
    config: Any,
    preset: str | None,
    settings: list[str] | None,
) -> Any:
    import trio

    from .locating import quiet_log

    quiet_log()
    overrides = gather(settings, event_plane__nats__servers=nats)
    sources = Sources(config, preset, overrides)

    async def act() -> Any:
        async with _events(sources) as events:
            return await action(events)

    return trio.run(act)


@asynccontextmanager
async def _events(sources: Sources) -> AsyncIterator[EventPlane]:
    from trinamo.runtime.config import NatsConfig

    from .locating import locate
    from .planes import open_event_plane

    config = sources.load()
    if config.event_plane.nats.servers == NatsConfig().servers:
        config = locate(sources).config
    section = config.event_plane.nats
    async with open_event_plane(section, list(section.servers)) as events:
        yield events
