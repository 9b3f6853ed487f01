"""What a process has in discovery: its instances and its cards, under one lease."""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from ..env import Env
from ..metrics.metrics import Metrics
from ..planes import ControlPlane
from ..protocol.discovery.instances import Instance, encode_instance
from ..worker.registration import LeaseFacts, Registrar


class LeaseState(enum.StrEnum):
    """What a process knows of its lease."""

    NONE = "none"
    """Never granted, or given back."""
    GRANTED = "granted"
    LOST = "lost"
    """The store forgot it; a new one is being asked for."""


class OwnEntries:
    """They are there as long as `registrar` runs, and until `leave`."""

    def __init__(
        self, control: ControlPlane, env: Env, *, metrics: Metrics, lease_ttl_s: float
    ) -> None:
        self.registrar = Registrar(
            control, env, ttl_s=lease_ttl_s, on_change=self._show, metrics=metrics
        )
        self._instances: dict[str, Instance] = {}
        self._cards: dict[str, None] = {}
        self._is_leaving = False
        self._states = metrics.counts(
            "lease_state", "1 at the lease's state, else 0", "state", may_fall=True
        )
        self._show(self.registrar.state)

    def _show(self, lease: LeaseFacts) -> None:
        is_lost = lease.lost_count and not self._is_leaving
        away = LeaseState.LOST if is_lost else LeaseState.NONE
        state = LeaseState.GRANTED if lease.lease_id else away
        for known in LeaseState:
            self._states.tally(known.value).value = known is state

    async def put_instance(self, instance: Instance) -> None:
        """Make `instance` findable; cancelled or failed, it is not, unless it was before."""
        await self._put(instance.key, partial(_render, instance))
        self._instances[instance.key] = instance

    async def put_card(self, key: str, value: bytes) -> None:
        """Put a key such as a model card; cancelled or failed, it is not there, unless it was."""
        await self._put(key, lambda _: value)
        self._cards[key] = None

    async def set_draining(self, instance: Instance, *, is_draining: bool) -> None:
        """Have `instance`, which is registered, passed over from now on, or chosen again."""
        if not self._is_leaving:
            await self._put(instance.key, partial(_render, replace(instance, draining=is_draining)))

    async def _put(self, key: str, render: Callable[[int], bytes]) -> None:
        is_new = not (key in self._instances or key in self._cards)
        try:
            await self.registrar.register(key, render)
        except BaseException:
            if is_new:
                self.registrar.abandon(key)
            raise

    def begin_leaving(self) -> None:
        """From now on a lost lease is no news, and nobody is chosen again."""
        self._is_leaving = True

    async def leave(self) -> None:
        """Models go at once; instances stay visible as draining until their work is done.

        In this order: a card that goes while its instance is there, and has not said that it
        leaves, may have gone with a lost lease only, and frontends keep it for a while.
        """
        for instance in list(self._instances.values()):
            draining = partial(_render, replace(instance, draining=True))
            await self.registrar.register(instance.key, draining)
        for card in list(self._cards):
            await self.registrar.withdraw(card)


def _render(instance: Instance, incarnation: int) -> bytes:
    return encode_instance(replace(instance, incarnation=incarnation))
