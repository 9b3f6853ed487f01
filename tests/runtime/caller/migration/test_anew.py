"""An answer of which its client has nothing yet is made anew, whoever makes it."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
import pytest

from tests.runtime.caller.migration.test_migration import REQUEST, Counting, Taken, policy, serve
from tests.runtime.endpoints import Cluster
from trinamo.runtime.caller.migration import MigratingAnswer
from trinamo.runtime.context import Context
from trinamo.runtime.errors import RemoteProtocolError, UnavailableError
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason, GenerateRequest


class Kept(Taken):
    """Of a client that gets nothing before the end."""

    keeps_all = True

    def restart(self) -> None:
        self.deltas.clear()


@pytest.mark.parametrize("body", [b"", b'{"stream":false}'])
async def test_an_answer_that_nobody_has_yet_is_made_anew_where_it_cannot_be_gone_on_with(
    cluster: Cluster, body: bytes
) -> None:
    pieces = [Delta(raw=b"{"), Delta(raw=b"}", finish_reason=FinishReason.STOP, output_tokens=2)]
    texts = [Delta("a", [1], None, 5), Delta("b", [2], FinishReason.STOP)]
    asked: list[GenerateRequest] = []

    async def breaks_once(request: GenerateRequest, _: Context) -> AsyncGenerator[Delta, None]:
        asked.append(request)
        first, last = pieces if body else texts
        yield first
        if len(asked) == 1:
            raise UnavailableError("the worker shut down", definite=False)
        yield last

    for instance_id in ("1", "2"):
        await cluster.serve(instance_id, breaks_once, request_type=GenerateRequest)
    request = msgspec.structs.replace(REQUEST, body=body, path="/v1/completions")
    kept = Kept()
    client = await cluster.client()
    await MigratingAnswer(client, request, Context("1"), kept, policy()).run()
    assert asked == [request, request]
    assert [delta.raw + delta.text.encode() for delta in kept.deltas] == (
        [b"{", b"}"] if body else [b"a", b"b"]
    )


async def test_what_whoever_takes_an_answer_refuses_is_asked_of_nobody_else(
    cluster: Cluster,
) -> None:
    """It would be too long elsewhere, too."""

    class Full(Kept):
        def take(self, items: list[Delta]) -> bool:
            raise RemoteProtocolError("too long")

    workers = Counting()
    client = await serve(cluster, workers)
    with pytest.raises(RemoteProtocolError, match="too long"):
        await MigratingAnswer(client, REQUEST, Context("1"), Full(), policy()).run()
    assert len(workers.asked) == 1


@pytest.mark.parametrize("sink", [Kept, Taken])
async def test_whoever_makes_other_tokens_makes_all_of_an_answer_or_none(
    cluster: Cluster, sink: type[Taken]
) -> None:
    """Another card may have come in force at any time since the worker was lost, or after it."""
    asked: list[GenerateRequest] = []

    async def breaks_once(request: GenerateRequest, _: Context) -> AsyncGenerator[Delta, None]:
        asked.append(request)
        yield Delta("a", [1], None, 5)
        if len(asked) == 1:
            raise UnavailableError("the worker shut down", definite=False)
        yield Delta("b", [2], FinishReason.STOP)

    for instance_id in ("1", "2"):
        await cluster.serve(instance_id, breaks_once, request_type=GenerateRequest)
    taken, looks = sink(), iter([False, True, True])
    answer = MigratingAnswer(
        *(await cluster.client(), REQUEST, Context("1"), taken, policy()),
        can_resume=True,
        is_replaced=lambda: next(looks) if asked else False,
    )
    if sink is Kept:
        await answer.run()
        assert asked == [REQUEST, REQUEST]
        assert [delta.text for delta in taken.deltas] == ["a", "b"]
    else:
        with pytest.raises(UnavailableError, match="does not have a live instance"):
            await answer.run()
        assert asked == [REQUEST]
