"""A survey from outside: over a connection to etcd of our own, by asking, and by dialling as frontends do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

import msgspec
import trio

from trinamo.runtime.config.config import Config
from trinamo.runtime.config.keys import is_loopback
from trinamo.runtime.config.membership_secret import read_secret
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import ConfigError, TrinamoError, UnavailableError
from trinamo.runtime.view.listing import Listing, read_listing
from trinamo.runtime.view.survey import ASK_TIMEOUT_S, Asking, Survey, survey_around, why_away
from trinamo.transports.assembly.planes import open_control_plane
from trinamo.transports.openai.http_client import fetch
from trinamo.transports.tcp import TcpOptions, open_request_plane

from ..running.locating import NOTHING_RUNS, Target, somebody_listens
from ..running.neighbours import neighbours_of

ETCD_TIMEOUT_S: Final = 3.0
"""Longer than the choice of a new leader takes."""


async def survey_cluster(target: Target, *, url: str = "", key: str = "") -> Survey:
    """Look; `url` is a frontend that `trinamo up` here did not start, `key` one for its clients.

    Raises `UnavailableError` or `ConnectError` with a sentence if neither etcd nor a frontend is
    there to be asked.
    """
    config, run = target.config, target.run
    endpoints = config.control_plane.etcd.endpoints
    neighbours = neighbours_of(endpoints, run, url)
    is_known = run is not None or target.is_named or neighbours.frontends
    if not is_known and not await somebody_listens(endpoints[0]):
        raise UnavailableError(NOTHING_RUNS)
    listing = await _listing(target, can_wait=not neighbours.frontends)
    async with _dialling(config) as dial:
        return await survey_around(
            listing,
            neighbours,
            Asking(fetch, key=key, dial=dial),
            servers=config.event_plane.nats.servers,
        )


async def _listing(target: Target, *, can_wait: bool) -> Listing | str:
    """What etcd says, or why it says nothing; `UnavailableError` if nobody else can be asked."""
    section = target.config.control_plane.etcd
    endpoints = section.endpoints
    timeout_s = min(section.connect_timeout_s, ETCD_TIMEOUT_S)
    brief = msgspec.structs.replace(section, connect_timeout_s=timeout_s)
    # Trying again for a while is of no use if somebody else can be asked.
    if not (can_wait or any([await somebody_listens(each) for each in endpoints])):
        return f"etcd at {','.join(endpoints)} does not answer"
    try:
        async with open_control_plane(brief, list(endpoints)) as control:
            return await read_listing(control)
    except ConfigError:
        raise
    except TrinamoError as error:
        if not can_wait:
            return why_away(error, endpoints)
        more = "a frontend named with --url tells what it last knew"
        raise UnavailableError(f"{error.message}; {more}") from error


@asynccontextmanager
async def _dialling(config: Config) -> AsyncIterator[Callable[[str, str], Awaitable[str]]]:
    """Tries an address as a frontend with this configuration does; nothing is asked there.

    Without the cluster's secret, which who only looks may lack, just what is on this machine is tried.
    """
    secret = b""
    with suppress(ConfigError):
        secret = read_secret(config.security)
    options = TcpOptions.of(config.data_plane.tcp, secret=secret, connect_timeout_s=ASK_TIMEOUT_S)
    async with open_request_plane(options, RealEnv()) as plane:

        async def dial(address: str, instance_id: str) -> str:
            if not (secret or is_loopback(address.rpartition(":")[0].strip("[]"))):
                return ""
            connected = trio.CancelScope()
            try:
                with connected:
                    await plane.hold(address, connected.cancel, instance_id=instance_id)
            except TrinamoError as error:
                return error.message
            return ""

        yield dial
