"""What decode and prefill workers say to each other."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, strategies as st

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.protocol.disaggregation.messages import (
    Kept,
    Lent,
    Pairing,
    PrefillAsk,
    PrefillDone,
    RemotePrefillRequest,
    ask_bytes_max_for,
    decode_done,
    decode_job,
    decode_prompt,
    encode,
    hash_of,
    prefill_request,
)
from trinamo.runtime.protocol.openai.generate import GenerateRequest
from trinamo.runtime.protocol.queue.jobs import check_queue_name

ASKED = GenerateRequest(
    model="m", prompt="hello", max_tokens=9, temperature=0.5, top_p=0.9, seed=3, stop=["x"]
)


def test_a_job_and_its_end_survive_the_wire() -> None:
    job = RemotePrefillRequest(
        id="a1",
        request_id="r",
        prompt_hash=hash_of(b"a prompt"),
        instance_id="f" * 16,
        timeout_s=2.0,
    )

    assert decode_job(encode(job)) == job
    assert decode_done(encode(PrefillDone(first_token=7))).first_token == 7


def test_a_prompt_is_taken_only_by_the_hash_that_its_job_names() -> None:
    asked = prefill_request(ASKED, [1, 2, 3])
    prompt = encode(asked)

    assert decode_prompt(prompt, hash_of(prompt)) == asked
    with pytest.raises(RemoteProtocolError, match="not the one"):
        decode_prompt(encode(prefill_request(ASKED, [1, 2, 4])), hash_of(prompt))
    with pytest.raises(RemoteProtocolError):
        decode_prompt(b"none", hash_of(b"none"))


def test_a_prefill_worker_draws_the_token_that_was_to_be_drawn_and_no_other() -> None:
    asked = prefill_request(ASKED, [1, 2, 3])

    assert asked == GenerateRequest(
        model="m", token_ids=[1, 2, 3], max_tokens=1, temperature=0.5, top_p=0.9, seed=3
    )


def test_a_prefill_worker_knows_where_the_answer_begins_and_what_shapes_it() -> None:
    """Penalties count the answer alone, and a grammar begins with it."""
    shaped = msgspec.structs.replace(
        ASKED,
        delivered_ids=[8, 9],
        presence_penalty=1.0,
        json_schema="{}",
        logprobs=3,
        min_tokens=5,
        stop_token_ids=[7],
        ignore_eos=True,
        return_token_ids=True,
    )
    asked = prefill_request(shaped, [1, 2, 3, 8, 9])

    assert (asked.token_ids, asked.delivered_ids, asked.max_tokens) == ([1, 2, 3], [8, 9], 3)
    assert (asked.presence_penalty, asked.json_schema, asked.logprobs) == (1.0, "{}", None)
    assert (asked.min_tokens, asked.stop_token_ids, asked.ignore_eos) == (5, [7], True)
    assert not asked.return_token_ids


@given(st.binary(max_size=64))
def test_bytes_that_are_no_message_are_the_peer_s_fault(data: bytes) -> None:
    """Decoding gives a message or `RemoteProtocolError`, whatever the bytes."""
    for decode in (decode_job, decode_done):
        try:
            decode(data)
        except RemoteProtocolError:
            continue


def test_a_token_that_none_can_be_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        decode_done(msgspec.msgpack.encode({"first_token": -1}))


@pytest.mark.parametrize("ticket", [-1, 0, 2**63])
def test_a_ticket_that_nobody_can_grant_is_refused(ticket: int) -> None:
    """No backend could put it on the wire."""
    for kind, others in (
        (Lent, {"skip_blocks": 0, "prompt": b""}),
        (Kept, {"type": "Kept", "first_token": 1, "engine_id": "e"}),
    ):
        data = msgspec.msgpack.encode({"ticket": ticket, "block_ids": [1], **others})
        with pytest.raises(msgspec.ValidationError, match="ticket"):
            msgspec.msgpack.decode(data, type=kind)


def test_a_question_for_the_longest_prompt_is_taken_and_one_for_many_times_that_is_not() -> None:
    """Small tokens take a byte each: the bound is on what a decoder would make of them."""

    def size_of(tokens: int, token_id: int) -> int:
        asked = msgspec.structs.replace(ASKED, model="m" * 256, seed=2**64 - 1)
        request = prefill_request(asked, [token_id] * tokens)
        return len(encode(PrefillAsk(request=request, descriptor=b"d" * 512, timeout_s=30.0)))

    bound = ask_bytes_max_for(32_768)
    assert size_of(32_768, 2**31 - 1) <= bound < size_of(10 * 32_768, 0)


def test_only_equal_fingerprints_of_one_namespace_meet() -> None:
    """The names are valid, and differ in every way that two workers may not fit."""
    pairings = [
        Pairing.of(namespace, fingerprint)
        for namespace in ("one", "two")
        for fingerprint in ("exact/a", "exact/b")
    ]
    for names in zip(
        *(
            (each.queue, str(each.prefill_endpoint), str(each.handoff_endpoint))
            for each in pairings
        ),
        strict=True,
    ):
        assert len(set(names)) == 4
    check_queue_name(Pairing.of("n" * 63, "f" * 500).queue)
    assert Pairing.of("one", "exact/a") == pairings[0]
