"""Whom clients may ask: frontends by their health, as a balancer in front of several sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import attrs
import httpx
import trio

LOOK_S: Final = 0.25


@attrs.define(eq=False)
class Balancer:
    """`places` says the URL of each frontend by name; one that has none at present is not asked."""

    places: Callable[[], Mapping[str, str]]
    serving: set[str] = attrs.field(factory=set)
    """Names of those whose health was good when it was looked at last."""
    barred: set[str] = attrs.field(factory=set)
    """Names that get nothing, whatever they say of their health."""

    def bar(self, name: str) -> None:
        """At once and until `barred` has it no more."""
        self.barred.add(name)
        self.serving.discard(name)

    async def run(self, client: httpx.AsyncClient) -> None:
        """Look again and again, until cancelled."""
        while True:
            for name, url in self.places().items():
                is_well = await _is_well(client, url)
                (self.serving.add if is_well else self.serving.discard)(name)
            self.serving -= self.barred
            await trio.sleep(LOOK_S)


async def _is_well(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/health", timeout=1)).is_success
    except httpx.HTTPError:
        return False
