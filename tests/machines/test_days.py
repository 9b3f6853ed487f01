"""What happens within days on two machines: a cable that swallows, names that nobody tells, clocks that are wrong."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import trio

from tests import needs
from tests.cluster.processes import chat, until
from tests.machines.names import open_names
from tests.machines.site import ETCD, HTTP, NATS, STATUS, WORKER, Site, open_site

LONG = "a long prompt " * 110
MTU = 1300
LOST = re.compile(rb"connection (is )?lost")
"""As the log says it of an instance that is listed, or whose lease has ended a moment before."""
CLOCK = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
"""Tells a process another time than the machine's: as many seconds away as a file says, at each look."""


async def ask(site: Site, text: str) -> tuple[int, dict[str, Any]]:
    url = f"http://{site.one.address}:{HTTP}/v1/chat/completions"
    answer = await site.client.post(url, json=chat(text, max_tokens=5, temperature=0))
    return answer.status_code, answer.json()


async def test_a_cable_that_swallows_long_packets_ends_long_requests_with_a_reason(
    tmp_path: Path,
) -> None:
    """Handshakes and short requests pass, and no ICMP says why the others do not."""
    short = {"http": {"queue_max": 0}, "router": {"wait_s": 0}}
    async with open_site(tmp_path, workers=[("two", WORKER)], **short) as site:
        assert (await ask(site, f"0 {LONG}"))[0] == 200
        site.between.change = lambda each: each.payload if len(each.payload) < MTU else None
        status, said = await ask(site, f"1 {LONG}")
        assert status == 503
        assert "neither opened its stream nor refused it within" in said["error"]["message"]
        numbers = itertools.count()

        async def is_answered(text: str = "short") -> bool:
            return (await ask(site, f"{next(numbers)} {text}"))[0] == 200

        await until(is_answered, "short prompts are answered")
        found = await site.one.run("trinamo status --config cluster.yaml --json", codes=(3,))
        assert "does not answer" in json.dumps(json.loads(found)["away"])
        # The remedy where nobody mends the cable: the kernel finds out.
        for machine in (site.one, site.two):
            await machine.run("sysctl -qw net.ipv4.tcp_mtu_probing=1")
        await until(lambda: is_answered(LONG), "long prompts are answered")


async def test_names_that_nobody_tells_stop_nothing_that_runs(tmp_path: Path) -> None:
    """A name server that is silent: who starts says what it sought, who runs goes on, and ends in order."""
    async with open_site(tmp_path, workers=[("one", WORKER)]) as site:
        addresses: dict[str, str] = dict.fromkeys(("etcd", "nats"), site.one.address)
        async with open_names(site.here, addresses, site.two) as names:
            line = f"{WORKER} --set worker.status_port={STATUS + 1}"
            worker = site.two.start("worker", line)
            site.workers.append(worker)
            await worker.ready(b"worker is ready")
            await site.wait_live(2)
            names.is_mute = True
            await site.servers.nats[0].restart()
            await worker.ready(b"no name server tells the address of 'nats'")
            await site.wait_asked(1)
            late = site.two.start("late", WORKER)
            await until(lambda: has_ended(late.child.poll), "who starts meanwhile ends")
            assert "no etcd answers at etcd:2379" in late.log.read_text()
            names.is_mute = False

            async def is_connected() -> bool:
                return await site.metric(1, "event_plane_connected") == 1

            await until(is_connected, "it has found NATS again")
            names.is_mute = True
            await site.servers.nats[0].restart()
            await until(lambda: is_not(is_connected), "it has lost NATS")
            await worker.end()


async def has_ended(poll: Any) -> bool:
    return poll() is not None


async def is_not(holds: Any) -> bool:
    return not await holds()


@needs.CLOCKS.unless(CLOCK.exists())
@pytest.mark.parametrize("day", ["+86400", "-86400"])
async def test_a_clock_that_is_wrong_by_minutes_costs_nothing_and_by_a_day_new_connections(
    tmp_path: Path, day: str
) -> None:
    """Leases, seals and timeouts do not ask it; certificates do, and who reads them says so."""
    async with open_site(tmp_path, workers=[("one", WORKER)]) as site:
        clock = trio.Path(site.two.home / "clock")
        await clock.write_text("+0\n")
        faked = f"LD_PRELOAD={CLOCK} FAKETIME_TIMESTAMP_FILE=clock FAKETIME_NO_CACHE=1"
        line = f"env {faked} FAKETIME_DONT_FAKE_MONOTONIC=1 {WORKER}"
        worker = site.two.start("worker", f"{line} --set worker.status_port={STATUS + 1}")
        site.workers.append(worker)
        await worker.ready(b"worker is ready")
        await site.wait_live(2)
        for step in ("+600", "-600"):
            await clock.write_text(f"{step}\n")
            await lose_connections(site)
            await site.wait_asked(1)
        await clock.write_text(f"{day}\n")
        await site.wait_asked(1)
        await lose_connections(site)
        await site.frontend.ready(b"the clocks of both machines differ by hours")
        assert (await ask(site, "hello"))[0] == 200
        found = await site.one.run("trinamo status --config cluster.yaml --json", codes=(3,))
        assert "the clocks of both machines differ" in json.dumps(json.loads(found)["away"])
        await clock.write_text("+0\n")
        await site.wait_asked(1)
        await worker.end()


async def lose_connections(site: Site) -> None:
    """Have the frontend and the worker on machine two lose what they have of each other."""
    before = len(LOST.findall(site.frontend.log.read_bytes()))

    async def has_lost() -> bool:
        await ask(site, "hello")
        return len(LOST.findall(site.frontend.log.read_bytes())) > before

    clear = (ETCD, NATS, HTTP, STATUS, STATUS + 1)
    site.between.change = lambda each: (
        each.payload if each.is_of(*clear) else bytes(len(each.payload))
    )
    await until(has_lost, "the connection to the worker is lost")
    site.between.change = lambda each: each.payload
