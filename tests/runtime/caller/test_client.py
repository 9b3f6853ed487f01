"""The client: attempts, typed refusals, and what ends a stream that has begun."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from tests.runtime.caller.scripted import (
    DEAD,
    scripted,
    who_answers,
)
from tests.runtime.endpoints import Cluster
from tests.transports.tcp.ends import eventually
from trinamo.runtime.caller.client import Client
from trinamo.runtime.context import Context
from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    EngineError,
    OverloadedError,
    RemoteProtocolError,
    RequestError,
    TrinamoError,
    UnavailableError,
    UnknownModelError,
)
from trinamo.runtime.logs.fields import current_fields, log_fields
from trinamo.runtime.protocol.streams.request import (
    AckStatus,
    decode_envelope,
    encode_envelope,
)


async def test_a_dead_instance_is_tried_once_then_inhibited_and_another_answers(
    cluster: Cluster,
) -> None:
    await cluster.put("1", {"tcp": DEAD})
    await cluster.serve("2")
    client = await cluster.client()
    await client.router.wait_instances(2)
    assert [await who_answers(client) for _ in range(6)] == ["2"] * 6


async def test_a_request_s_lines_name_its_last_instance_and_those_about_an_instance_name_it(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.put("1", {"tcp": DEAD})
    await cluster.serve("2")
    client = await cluster.client()
    await client.router.wait_instances(2)

    for _ in range(2):
        with log_fields(request_id="r"):
            assert await who_answers(client) == "2"
            assert current_fields()["instance_id"] == "2"

    told = {vars(each)["instance_id"] for each in caplog.records if "inhibited" in each.message}
    assert told == {"1"}


async def test_an_address_that_makes_no_sense_harms_only_who_advertised_it(
    cluster: Cluster,
) -> None:
    """It comes from discovery, where anybody may have written it."""
    for number, address in enumerate(("a..b:1", "\u2028:1", "", ":0", "x" * 300 + ":1")):
        await cluster.put(f"{number + 1:x}", {"tcp": address})
    await cluster.serve("f")
    client = await cluster.client()
    await client.router.wait_instances()
    assert [await who_answers(client) for _ in range(6)] == ["f"] * 6


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (AckStatus.OVERLOADED, OverloadedError),
        (AckStatus.DRAINING, UnavailableError),
        (AckStatus.UNKNOWN_ENDPOINT, UnavailableError),
        (AckStatus.UNKNOWN_MODEL, UnknownModelError),
        (ConnectError("x"), ConnectError),
        (DisconnectedError("x"), DisconnectedError),
        (RemoteProtocolError("x"), RemoteProtocolError),
    ],
)
async def test_what_may_go_better_elsewhere_is_tried_elsewhere_and_nowhere_twice(
    cluster: Cluster, answer: AckStatus | TrinamoError, error: type[TrinamoError]
) -> None:
    client, plane = await scripted(cluster, answer, answer, answer)
    with pytest.raises(error):
        async with client.stream(1, int):
            raise AssertionError
    assert sorted(envelope.instance_id for envelope in plane.sent) == ["1", "2", "3"]
    assert len({envelope.id for envelope in plane.sent}) == 3


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (AckStatus.INVALID, RequestError),
        (EngineError("x"), EngineError),
    ],
)
async def test_what_would_fail_elsewhere_too_is_raised_at_once(
    cluster: Cluster, answer: AckStatus | TrinamoError, error: type[TrinamoError]
) -> None:
    client, plane = await scripted(cluster, answer)
    with pytest.raises(error):
        async with client.stream(1, int):
            raise AssertionError
    assert len(plane.sent) == 1


async def test_attempts_have_a_bound_and_a_named_instance_is_the_only_one(cluster: Cluster) -> None:
    client, plane = await scripted(cluster, *[AckStatus.OVERLOADED] * 3, attempts_max=2)
    with pytest.raises(OverloadedError):
        async with client.stream(1, int):
            raise AssertionError
    assert len(plane.sent) == 2
    with pytest.raises(OverloadedError):
        async with client.stream(1, int, instance_id="3"):
            raise AssertionError
    assert plane.sent[-1].instance_id == "3"
    assert len(plane.sent) == 3


async def test_a_stopped_request_is_not_tried_again(cluster: Cluster) -> None:
    client, plane = await scripted(cluster, AckStatus.OVERLOADED)
    context = Context("r")
    context.stop()
    with pytest.raises(OverloadedError):
        async with client.stream(1, int, context=context):
            raise AssertionError
    assert len(plane.sent) == 1


async def test_nobody_is_unavailable(cluster: Cluster) -> None:
    client = await cluster.client()
    with pytest.raises(UnavailableError):
        async with client.stream(1, int):
            raise AssertionError
    await cluster.put("1", {"carrier_pigeon": "coop-7"})
    await client.router.wait_instances()
    for instance_id, why in ((None, "can be asked"), ("1", "carrier_pigeon")):
        with pytest.raises(UnavailableError, match=why):
            async with client.stream(1, int, instance_id=instance_id):
                raise AssertionError


async def test_a_unary_request_is_repeated_only_if_it_certainly_did_not_run(
    cluster: Cluster,
) -> None:
    client, plane = await scripted(cluster, ConnectError("x"), DisconnectedError("x"))
    unary = Client(client.router, cluster.home, client.env)
    with pytest.raises(DisconnectedError):
        await unary.call(1, str)
    assert len(plane.sent) == 2
    plane.answers = [AckStatus.ACCEPTED]
    assert await unary.call(1, str) == "done"


async def test_a_unary_request_asks_nobody_twice_and_as_many_as_it_may(cluster: Cluster) -> None:
    refused = [AckStatus.OVERLOADED] * 6
    client, plane = await scripted(cluster, *refused, instances=4, attempts_max=3)
    with pytest.raises(OverloadedError):
        await client.call(1, str)
    assert len({envelope.instance_id for envelope in plane.sent}) == len(plane.sent) == 3


async def test_a_unary_request_passes_over_an_instance_that_no_plane_reaches(
    cluster: Cluster,
) -> None:
    await cluster.put("1", {"carrier_pigeon": "coop-7"})
    client, plane = await scripted(cluster, *[AckStatus.ACCEPTED] * 4, instances=0)
    await cluster.put("2", {"tcp": DEAD})
    await client.router.wait_instances(2)
    assert [await client.call(1, str) for _ in range(4)] == ["done"] * 4
    assert {envelope.instance_id for envelope in plane.sent} == {"2"}


async def test_an_instance_that_answers_is_no_longer_inhibited(cluster: Cluster) -> None:
    for each in ("1", "2"):
        await cluster.serve(each)
    client = await cluster.client()
    await client.router.wait_instances(2)
    chosen = client.router.choose(instance_id="1")
    client.router.fail(chosen, RemoteProtocolError("nonsense"), Context("r"))
    assert {await who_answers(client) for _ in range(4)} == {"2"}
    async with client.stream(1, int, instance_id="1") as stream:
        assert [item async for item in stream] == [0]
    assert {await who_answers(client) for _ in range(4)} == {"1", "2"}


async def test_the_ids_of_attempts_fit_whatever_the_request_is_called(cluster: Cluster) -> None:
    client, plane = await scripted(cluster, *[AckStatus.OVERLOADED] * 3)
    with pytest.raises(OverloadedError):
        async with client.stream(1, int, context=Context("long" * 100 + "-end")):
            raise AssertionError
    for envelope in plane.sent:
        assert decode_envelope(encode_envelope(envelope)).id == envelope.id
        assert "-end." in envelope.id
    assert len({envelope.id for envelope in plane.sent}) == 3


async def test_a_result_that_does_not_decode_is_the_worker_s_fault(cluster: Cluster) -> None:
    client, _ = await scripted(cluster, AckStatus.ACCEPTED)
    with pytest.raises(RemoteProtocolError):
        await client.call(1, int)


# --- after the first item ------------------------------------------------------------------------


async def test_an_item_that_does_not_decode_ends_the_stream_typed(cluster: Cluster) -> None:
    await cluster.serve("1")
    client = await cluster.client()
    async with client.stream(3, str) as stream:
        with pytest.raises(RemoteProtocolError):
            await anext(stream)


async def test_a_worker_that_breaks_off_is_inhibited_and_the_stream_is_not_repeated(
    cluster: Cluster,
) -> None:
    async def breaks_off(_: int, __: Context) -> AsyncGenerator[int, None]:
        yield 0
        raise DisconnectedError("the connection behind it broke")

    await cluster.serve("1", breaks_off)
    client = await cluster.client()
    async with client.stream(1, int) as stream:
        assert await anext(stream) == 0
        with pytest.raises(DisconnectedError):
            await anext(stream)
    await cluster.serve("2")
    await client.router.wait_instances(2)
    assert {await who_answers(client) for _ in range(4)} == {"2"}


async def test_draining_instances_get_nothing_new(cluster: Cluster) -> None:
    first, _ = await cluster.serve("1"), await cluster.serve("2")
    client = await cluster.client()
    await client.router.wait_instances(2)
    first.refuse_new()
    # Discovery has not heard of it yet: the worker's own word sends the request elsewhere.
    assert {await who_answers(client) for _ in range(4)} == {"2"}
    address = client.router.instances[0].transports
    await cluster.put("1", address, draining=True)
    await eventually(lambda: client.router.instances[0].draining)
    assert {await who_answers(client) for _ in range(4)} == {"2"}
