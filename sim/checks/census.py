"""I5, I12 and I16: what the living processes hold, counted from outside.

`leftovers` is asked again and again by the driver until it is empty or the time for it is up;
`check` tells what was left then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ..cluster.roles import Process
    from ..scenario.outcome import Outcome

__all__ = ["check", "leftovers", "overflows"]

GAUGES: Final = ("requests_in_flight", "worker_requests_in_flight", "worker_streams")


def leftovers(outcome: Outcome) -> dict[str, float]:
    """What living processes hold of any request, by name; empty at quiescence."""
    found: dict[str, float] = {}
    for name, process in outcome.cluster.processes.items():
        if not outcome.cluster.is_up(name):
            continue
        for what, count in _held(process):
            if count:
                found[f"{name} {what}"] = count
        for gauge, value in _gauges(process):
            if value:
                found[f"{name} gauge {gauge}"] = value
    return found


def _held(process: Process) -> Iterator[tuple[str, float]]:
    transports, runtime = process.transports, process.runtime
    if transports.home is not None:
        yield "subjects", transports.home.registered_count
    if transports.calls is not None:
        yield "calls home", transports.calls.open_count
    if process.engine is not None:
        statistics = process.engine.statistics()
        yield "running sequences", statistics.running
        yield "waiting sequences", statistics.waiting
        yield "blocks", statistics.blocks_used
    if process.service is not None:
        yield "admitted requests", process.service.admission.in_flight
    if runtime is not None:
        if runtime.worker is not None:
            yield "served requests", runtime.worker.active_count
        for client in runtime.clients:
            yield "flights", client.router.in_flight


def _gauges(process: Process) -> Iterator[tuple[str, float]]:
    if process.metrics is None:
        return
    for family in process.metrics.registry.collect():
        if family.name.removeprefix("trinamo_") in GAUGES:
            for sample in family.samples:
                yield family.name, sample.value


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
    bound = tcp.window_bytes if tcp.streams == "multiplexed" else tcp.queue_bytes_max
    # The last item, or the last read, may be above it.
    buffered_max = bound + tcp.buffer_bytes
    for name, process in outcome.cluster.processes.items():
        if not outcome.cluster.is_up(name):
            continue
        home, runtime, service = process.transports.home, process.runtime, process.service
        if home is not None:
            if home.registered_count > tcp.subjects_max:
                yield f"{name} has {home.registered_count} subjects"
            for registration in home._registrations.values():  # noqa: SLF001 -- as above
                channel = getattr(registration, "channel", None)
                if channel is not None and channel.buffered_bytes > buffered_max:
                    yield f"{name} buffers {channel.buffered_bytes} bytes of one stream"
        worker = None if runtime is None else runtime.worker
        if worker is not None and worker.active_count > config.worker.requests_max:
            yield f"{name} serves {worker.active_count} requests"
        if service is not None and service.admission.in_flight > config.http.requests_max:
            yield f"{name} admitted {service.admission.in_flight} requests"
