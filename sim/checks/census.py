"""I5, I12 and I16: what the living processes hold, counted from outside.

`leftovers` is asked again and again by the driver until it is empty or the time for it is up;
`check` tells what was left then. A link that a worker has dialled may stay for `idle_s` after its last
stream, and no longer; its worker closes it. Whatever waits in it is bounded: what the socket has not
taken, for all streams together, and what a stream has no credit for, each by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import trio

from trinamo.transports.tcp.streams.channel import PUSHED_ITEMS_MAX

from ..core.host import incarnation_of

if TYPE_CHECKING:
    from trinamo.runtime.config.http import HttpConfig
    from trinamo.runtime.config.tcp import TcpConfig
    from trinamo.transports.tcp.streams.link import Link

    from ..cluster.outcome import Outcome
    from ..cluster.roles import Process


EVENT_BYTES_MAX: Final = 512
"""Of a token of the simulated engine."""
CROWD: Final = 4
"""Tasks of one name that a process may have without a word of its instances: slots, keys."""
SOURCES: Final = "trinamo.runtime.events.source.EventSource."
"""Of each endpoint three tell, of its load, its state and its blocks; of each client one, of what its router has chosen."""
OF_OTHERS: Final = ("trinamo.runtime.kv.transfer.leases.",)
"""Whose tasks are as many as blocks in quarantine, which I9 counts."""
CLOSING_S: Final = 1.0
"""What an end of a link may take to look whether it is idle, and to close it."""
GAUGES: Final = ("requests_in_flight", "worker_requests_in_flight", "worker_streams")


def leftovers(outcome: Outcome) -> dict[str, float]:
    """What living processes hold of any request, by name; empty at quiescence."""
    found: dict[str, float] = {}
    for name, process in outcome.cluster.processes.items():
        if not outcome.cluster.is_up(name):
            continue
        for what, count in _held(process, outcome.cluster.plan.config.data_plane.tcp):
            if count:
                found[f"{name} {what}"] = count
        for gauge, value in process.metrics.samples() if process.metrics is not None else ():
            if value and gauge.removeprefix("trinamo_") in GAUGES:
                found[f"{name} gauge {gauge}"] = value
    return found | _crowds(outcome)


def _crowds(outcome: Outcome) -> dict[str, float]:
    """Tasks of a living process that are more than it has slots, and more than instances it knows, or sources."""
    found: Counter[tuple[str, str]] = Counter()
    for task in outcome.world.tasks():
        life = incarnation_of(task)
        if life is not None and life.may_run and task.name.startswith("trinamo.runtime."):
            found[life.host.name, task.name] += 1
    crowds = {}
    for (host, name), count in found.items():
        process = outcome.cluster.processes.get(host)
        runtime = None if process is None else process.runtime
        known = 0
        if runtime is not None and name.startswith(SOURCES):
            worker = runtime.worker
            served = 0 if worker is None else len(worker._endpoints)  # noqa: SLF001 -- as below
            known = 3 * served + len(runtime.clients)
        elif runtime is not None:
            # An instance is held over each plane that it speaks.
            known = sum(len(each.router.instances) for each in runtime.clients)
            known *= len(runtime.data.request_planes)
        if count > max(CROWD, known) and not name.startswith(OF_OTHERS):
            crowds[f"{host} tasks {name}"] = float(count)
    return crowds


def _held(process: Process, tcp: TcpConfig) -> Iterator[tuple[str, float]]:
    transports, runtime = process.transports, process.runtime
    yield "idle links", _overdue_links(process, tcp)
    if transports.home is not None:
        yield "subjects", transports.home.registered_count
        yield "streams of links", transports.home.stream_count
    if transports.calls is not None:
        yield "calls home", transports.calls.open_count
    if transports.server is not None:
        yield "streams of callers", transports.server.stream_count
    if process.engine is not None:
        statistics = process.engine.statistics()
        yield "running sequences", statistics.running
        yield "waiting sequences", statistics.waiting
        yield "blocks", statistics.blocks_used
    if process.service is not None:
        yield "admitted requests", process.service.admission.in_flight
        bodies = process.service.admission.bodies
        yield "bytes of bodies", bodies.bytes_held + bodies.arriving.amount
        yield "waiting requests", process.service.admission.queue.length
    if runtime is not None:
        if runtime.transfers is not None:
            yield "transfers", runtime.transfers.leases.in_flight_count
        if runtime.worker is not None:
            yield "served requests", runtime.worker.active_count
        for client in runtime.clients:
            yield "flights", client.router.in_flight
            records = client.router._known._records  # noqa: SLF001 -- nobody else may count them
            yield "instances that left", len(records) - len(client.router.instances)


def check(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """What was left when the time to settle was over."""
    if outcome.load_ended_s is None or outcome.is_settled:
        return
    for name, value in outcome.leftovers.items():
        yield ("I16" if " gauge " in name else "I5"), f"{name}: {value:g} left"


def overflows(outcome: Outcome) -> Iterator[str]:
    """Whatever is above its bound now; sampled by the driver."""
    config = outcome.cluster.plan.config
    tcp = config.data_plane.tcp
    # Credit says how much may come, and one item may always be.
    stream_max = tcp.window_bytes + tcp.buffer_bytes
    for name, process in outcome.cluster.processes.items():
        if not outcome.cluster.is_up(name):
            continue
        home, runtime, service = process.transports.home, process.runtime, process.service
        yield from _full_links(process, tcp)
        if home is not None:
            if home.registered_count > tcp.subjects_max:
                yield f"{name} has {home.registered_count} subjects"
            for registration in home._registrations.values():  # noqa: SLF001 -- as above
                channel = getattr(registration, "channel", None)
                if channel is not None and channel.buffered_bytes > stream_max:
                    yield f"{name} buffers {channel.buffered_bytes} bytes of one stream"
        worker = None if runtime is None else runtime.worker
        if worker is not None and worker.admitted_count > config.worker.requests_max:
            yield f"{name} serves {worker.admitted_count} requests"
        yield from _slow_clients(process, config.http)
        if service is not None and service.admission.in_flight > config.http.requests_max:
            yield f"{name} admitted {service.admission.in_flight} requests"
        if service is not None and service.admission.queue.length > (
            # Those that a worker refused wait again, whoever else does.
            config.http.queue_max + config.http.requests_max
        ):
            yield f"{name} lets {service.admission.queue.length} requests wait"


def _slow_clients(process: Process, http: HttpConfig) -> Iterator[str]:
    """What is kept of answers that clients do not read: a bound, and what is pushed at a time."""
    bound = http.backlog_bytes_max + EVENT_BYTES_MAX * PUSHED_ITEMS_MAX
    server = None if process.service is None else process.service.server
    for connection in getattr(server, "_connections", ()):
        output = getattr(connection, "output", None)
        if output is not None and len(output._backlog) > bound:  # noqa: SLF001
            yield f"{process.name} keeps {len(output._backlog)} bytes for one client"  # noqa: SLF001


# --- links ----------------------------------------------------------------------------------------


def _links(process: Process) -> Iterator[Link]:
    transports = process.transports
    home, calls, server = transports.home, transports.calls, transports.server
    if home is not None:
        yield from home.links
    if server is not None:
        yield from (caller.link for caller in server._callers)  # noqa: SLF001 -- looks inside
    if calls is not None:
        yield from calls.links


def _overdue_links(process: Process, tcp: TcpConfig) -> int:
    """Links without a stream that should be closed by now."""
    bound_s = tcp.idle_s + tcp.linger_s + CLOSING_S
    now_s = trio.current_time()
    return sum(
        not link.lanes and now_s > link._idle_since + bound_s  # noqa: SLF001 -- looks inside
        for link in _links(process)
        if link._taken is None  # noqa: SLF001 -- one that carries requests stays
    )


def _full_links(process: Process, tcp: TcpConfig) -> Iterator[str]:
    """What is above its bound now; one item may always be."""
    for link in _links(process):
        queued = link._mux.queued_bytes  # noqa: SLF001 -- looks inside
        if queued > tcp.queue_bytes_max + tcp.buffer_bytes:
            yield f"{process.name} has {queued} bytes to send on a link"
        for lane in link.lanes.values():
            backlog = lane._backlog or ()  # noqa: SLF001 -- as above
            waiting = sum(len(each) for each in backlog if isinstance(each, bytes))
            if waiting > tcp.window_bytes + tcp.buffer_bytes:
                yield f"{process.name} has {waiting} bytes without credit on a stream"
