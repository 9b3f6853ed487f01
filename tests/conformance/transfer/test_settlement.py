"""What every settlement plane must do: ask a life at an address, and answer when asked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio

from tests.conformance.transfer.settlement_backends import (
    InMemory,
    OverSimulatedTcp,
    OverTcp,
    Place,
)
from tests.worlds import in_world
from trinamo.runtime.planes.settlement import InquiryReport, SettlementPlane
from trinamo.runtime.protocol.transfer.settlement import InquiryResult, PeerStatus, status_of

TICKET = 2**62 + 5


@pytest.fixture(params=["memory", "tcp", "simulated"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "simulated":
        simulated = OverSimulatedTcp()
        with in_world(simulated.world):
            yield simulated
    else:
        yield InMemory() if request.param == "memory" else OverTcp()


async def ask(
    asker: SettlementPlane, peer: SettlementPlane, ticket: int = TICKET, where: str = ""
) -> InquiryReport:
    with trio.fail_after(120):
        return await asker.inquire(where or peer.address, peer.incarnation, ticket, timeout_s=60)


async def test_the_owner_of_the_transfers_says_whether_the_ticket_moves(place: Place) -> None:
    async with place.asker() as asker, place.life() as peer:
        moving = {TICKET}
        with peer.answering(lambda ticket: ticket not in moving):
            assert (await ask(asker, peer)).result is InquiryResult.SAYS_MOVING
            assert (await ask(asker, peer, 7)).result is InquiryResult.SAYS_SETTLED
            moving.clear()
            assert (await ask(asker, peer)).result is InquiryResult.SAYS_SETTLED


async def test_nobody_who_could_know_means_that_it_moves(place: Place) -> None:
    async with place.asker() as asker, place.life() as peer:
        assert (await ask(asker, peer)).result is InquiryResult.SAYS_MOVING
        with peer.answering(lambda _: True):
            pass
        assert (await ask(asker, peer)).result is InquiryResult.SAYS_MOVING


async def test_what_an_owner_left_moving_is_not_settled_by_the_word_of_the_next(
    place: Place,
) -> None:
    async with place.asker() as asker, place.life() as peer:
        with peer.answering(lambda ticket: ticket != TICKET):
            pass
        with peer.answering(lambda _: True):
            assert (await ask(asker, peer)).result is InquiryResult.SAYS_MOVING
            assert (await ask(asker, peer, 7)).result is InquiryResult.SAYS_SETTLED


async def test_an_answer_says_where_it_came_from_and_is_found_there_again(place: Place) -> None:
    async with place.asker() as asker, place.life() as peer:
        first = await ask(asker, peer)
        assert first.reached
        assert await ask(asker, peer, where=first.reached) == first


async def test_a_life_that_is_over_is_refused(place: Place) -> None:
    async with place.asker() as asker:
        async with place.life() as peer:
            reached = (await ask(asker, peer)).reached
        # By number: what a name stands for may have changed, and is refused or not for that.
        assert (await ask(asker, peer, where=reached)).result is InquiryResult.REFUSED


async def test_another_life_at_the_address_is_not_taken_for_the_first(place: Place) -> None:
    async with place.asker() as asker:
        async with place.life() as first:
            await ask(asker, first)
        async with place.life() as second:
            with second.answering(lambda _: True):
                assert second.incarnation != first.incarnation
                assert (await ask(asker, first)).result is InquiryResult.REPLACED
                assert (await ask(asker, second)).result is InquiryResult.SAYS_SETTLED


async def test_what_is_not_refused_is_no_proof(place: Place) -> None:
    async with place.asker() as asker, place.life() as peer:
        found = await ask(asker, peer, where="nobody.invalid:1")
    assert status_of(found.result, is_known=False) is PeerStatus.UNKNOWN


async def test_many_questions_at_once_are_all_answered(place: Place) -> None:
    async with place.asker() as asker, place.life() as peer, trio.open_nursery() as nursery:
        found: list[InquiryResult] = []

        async def one(ticket: int) -> None:
            found.append((await ask(asker, peer, ticket)).result)

        with peer.answering(lambda ticket: ticket % 2 == 0):
            for ticket in range(1, 41):
                nursery.start_soon(one, ticket)
            with trio.fail_after(120):
                while len(found) < 40:
                    await trio.sleep(0.01)
    assert found.count(InquiryResult.SAYS_SETTLED) == found.count(InquiryResult.SAYS_MOVING) == 20
