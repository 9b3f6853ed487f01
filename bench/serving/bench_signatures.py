"""What it costs to sign what members write to etcd and tell over NATS, and to look at the signatures of others.

In one process, CPU time: microseconds for one entry and for one report, and what a caller needs to learn a fleet of
workers and its model cards from one snapshot each, with signatures and without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import trio

from trinamo.runtime.caller.router import Router
from trinamo.runtime.env import RealEnv
from trinamo.runtime.events.load import LoadReport
from trinamo.runtime.planes import ControlPlane, Message, Snapshot
from trinamo.runtime.protocol.discovery.instances import EndpointName, Instance, encode_instance
from trinamo.runtime.protocol.discovery.model_cards import (
    MODEL_PREFIX,
    ModelTable,
    encode_card,
    model_key,
)
from trinamo.runtime.protocol.events.sequence import SequencedEvent, encode_event
from trinamo.runtime.protocol.openai.generate import ModelCard
from trinamo.transports.memory.control import MemoryControlPlane
from trinamo.transports.memory.events import MemoryBroker, MemoryEventPlane
from trinamo.transports.memory.store import MemoryStore
from trinamo.transports.security.sealing import SealedEvents, Sealer
from trinamo.transports.security.signatures import Signatures
from trinamo.transports.security.signed import signed_control

SECRET = b"a secret for measuring, and for nothing else"
NAME = EndpointName("bench", "backend", "generate")


def instance(number: int) -> Instance:
    return Instance(
        endpoint=str(NAME),
        id=f"{number:016x}",
        transports={"tcp": f"10.0.{number >> 8}.{number & 255}:4711"},
        metadata={"model": "m", "status": "http://10.0.0.1:9000", "reports": "load"},
    )


def cpu_us(call: Callable[[int], object], times: int) -> float:
    """Of one call, the median of five rounds."""
    numbers, rounds = count(), []
    for _ in range(5):
        began = time.process_time()
        for _ in range(times):
            call(next(numbers))
        rounds.append((time.process_time() - began) / times * 1e6)
    return statistics.median(rounds)


def one_entry(times: int) -> dict[str, float]:
    """Each has another number, so that no verdict is remembered; the certificate is, as of one worker's entries."""
    signatures, key = Signatures([SECRET], RealEnv()), instance(1).key
    value = encode_instance(instance(1))
    owner = instance(1).id
    made = [signatures.sign(owner, key, number, value) for number in range(5 * times)]

    def look(number: int) -> None:
        assert not signatures.fault(owner, key, number, value, made[number])

    return {
        "sign": cpu_us(lambda number: signatures.sign(owner, key, number, value), times),
        "verify": cpu_us(look, times),
    }


def one_report(times: int) -> dict[str, float]:
    """A load report, as a worker sends it once a second."""
    sealer = Sealer([SECRET], RealEnv().rng)
    events = SealedEvents(MemoryEventPlane(MemoryBroker()), sealer)
    subject = f"trinamo.load.bench.backend.generate.event.{instance(1).id}"
    body = msgspec.msgpack.encode(LoadReport(12, 3400, 8000, 512))
    payload = encode_event(SequencedEvent(instance(1).id, 1_800_000_000_000, 12345, body))
    signed = Message(subject, sealer.seal(payload, f"event {subject}".encode()))

    def look(_: int) -> None:
        assert events.opened(signed) is not None

    return {
        "seal": cpu_us(lambda _: sealer.seal(payload, subject.encode()), times),
        "open": cpu_us(look, times),
    }


async def learn(instances: int, *, is_signed: bool) -> float:
    """CPU milliseconds of a caller that has just started; each worker's are signed by its own certificate."""
    store = MemoryStore()
    secrets = [SECRET] if is_signed else []

    def plane() -> ControlPlane:
        return signed_control(MemoryControlPlane(store), RealEnv(), secrets)

    writer = plane()
    lease = await writer.grant_lease(600.0)
    for number in range(instances):
        one = instance(number)
        card = encode_card(ModelCard(name="m", endpoint=str(NAME)))
        await writer.put(one.key, encode_instance(one), lease_id=lease.id)
        await writer.put(model_key("m", one.id), card, lease_id=lease.id)
    reader, router = plane(), Router(MemoryControlPlane(), NAME, RealEnv())
    began = time.process_time()
    router.apply(Snapshot(1, (await reader.range(NAME.key_prefix)).entries))
    cards = (await reader.range(MODEL_PREFIX)).entries
    ModelTable().replace(((each.key, each.value) for each in cards), 0.0)
    took = time.process_time() - began
    assert len(list(router.statuses())) == instances
    return took * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=256)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    times = 50 if args.quick else 1000
    found: dict[str, Any] = {"entry_us": one_entry(times), "report_us": one_report(times * 10)}
    rounds = [
        [trio.run(lambda s=s: learn(args.instances, is_signed=s)) for s in (False, True)]
        for _ in range(1 if args.quick else 5)
    ]
    clear, signed = (statistics.median(each) for each in zip(*rounds, strict=True))
    found["learn_ms"] = {"instances": args.instances, "clear": clear, "signed": signed}
    for what, figures in found.items():
        print(what, ", ".join(f"{name} {value:.1f}" for name, value in figures.items()))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
