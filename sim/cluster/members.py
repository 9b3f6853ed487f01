"""Clients that are members of the cluster: they call workers through the runtime's own client.

One kind asks for an answer, the other streams input to a worker that answers it (`exchanges.py`).
"""

from __future__ import annotations

import random
from typing import Any, Final

import trio
from typing_extensions import override

from trinamo.runtime.context import Context, Reason
from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.openai.generate import Delta

from .exchanges import InputItem, exchange_endpoint
from .roles import Process, run_caller
from .workload import COMPLETE, ClientProfile, ClientRecord, SimulatedClient

DROPPED: Final = "dropped"


async def ask_as_member(
    process: Process,
    profile: ClientProfile,
    rng: random.Random,
    records: list[ClientRecord],
    config: Any,
) -> None:
    """The main function of a client host that is a member of the cluster."""
    section = config.worker
    kind, endpoint = _Caller, EndpointName(section.namespace, section.component, section.endpoint)
    if profile.via == "exchange":
        kind, endpoint = _Sender, exchange_endpoint(config)
    client = kind(process, profile, rng, records)
    await trio.sleep(profile.start_s)
    async with run_caller(process, config) as runtime:
        routed = await runtime.client(endpoint)
        await routed.router.wait_instances()
        for number in range(profile.requests):
            await client.ask(routed, await client.pause_and_begin(number))
        process.note("caller.done")
        await process.stop.wait()


class _Caller(SimulatedClient):
    async def ask(self, routed: Any, record: ClientRecord) -> None:
        terminal = "left alone"
        # The same name twice would be cancelled with the first.
        with Context(f"{record.name}-{self.process.env.rng.getrandbits(32):08x}") as context:
            try:
                terminal = await self._consume(routed, record, context)
            except TrinamoError as error:
                terminal = error.code
            self.process.note("caller.state", request=record.name, state=context.state)
        self.end(record, terminal)

    async def _consume(self, routed: Any, record: ClientRecord, context: Context) -> str:
        if self.profile.kill_after == 0:
            context.kill(self.profile.kill_reason)
        timeout_s = self.profile.timeout_s
        async with routed.stream(
            record.request, Delta, context=context, timeout_s=timeout_s
        ) as deltas:
            return await self._read(deltas, record, context)

    async def _read(self, deltas: Any, record: ClientRecord, context: Context) -> str:
        """Take the answer; how it ended, if not by an error."""
        profile = self.profile
        self.process.note("stream.open", request=record.name, instance=deltas.instance.id)
        async for delta in deltas:
            seen = len(record.text)
            self.take(record, delta.text)
            record.finish_reason = delta.finish_reason or record.finish_reason
            if profile.is_slow:
                await self.linger(record, seen)
            self._decide(record, context)
            if 0 <= profile.drop_after <= len(record.text):
                return DROPPED
        return COMPLETE

    def _decide(self, record: ClientRecord, context: Context) -> None:
        profile, count = self.profile, len(record.text)
        if 0 <= profile.stop_after <= count and not context.is_stopped:
            reason = profile.stop_reason
            self.process.note("caller.stop", request=record.name, tokens=count, reason=reason.value)
            context.stop(reason)
        if 0 <= profile.kill_after <= count and not context.is_killed:
            reason = profile.kill_reason
            self.process.note("caller.kill", request=record.name, tokens=count, reason=reason.value)
            context.kill(reason)
            # Upstream's stop after kill downgraded it; ours must not hear it.
            context.stop(Reason.STOP_REQUESTED)


class _Sender(_Caller):
    @override
    async def _consume(self, routed: Any, record: ClientRecord, context: Context) -> str:
        terminal = DROPPED
        async with (
            routed.exchange(
                record.request, Delta, context=context, timeout_s=self.profile.timeout_s
            ) as exchange,
            open_nursery() as nursery,
        ):
            nursery.start_soon(self._send, exchange, record, nursery.cancel_scope)
            terminal = await self._read(exchange, record, context)
            nursery.cancel_scope.cancel()
        return terminal

    async def _send(self, exchange: Any, record: ClientRecord, leaving: trio.CancelScope) -> None:
        profile, note = self.profile, self.process.note
        padding = bytes(profile.input_bytes)
        try:
            for index, text in enumerate(record.expected):
                await trio.sleep(profile.input_pause_s)
                if index == profile.cut_input_after:
                    # Of the exchange, and that in the middle of its input.
                    leaving.cancel()
                    return
                note("caller.input", request=record.name, index=index)
                await exchange.send(InputItem(index, text, padding))
            note("caller.input_end", request=record.name)
            await exchange.finish()
        except TrinamoError as error:
            # What becomes of the request is said by the end of its answer.
            note("caller.refused", request=record.name, error=error.code)
