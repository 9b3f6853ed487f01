"""Prompts that prefill workers compute give the tokens that one engine alone gives, in both modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import msgspec
import pytest
import trio

from tests.runtime.disaggregation.serving import (
    BLOCK_TOKENS,
    MODES,
    alone,
    make_engine,
    make_engine_of_own_memory,
    open_workers,
    prompt,
    tokens,
)
from tests.runtime.one_process import OneProcess, config
from trinamo.runtime.engines import open_echo_engine
from trinamo.runtime.engines.exact.engine import ExactEngine
from trinamo.runtime.engines.loop.host import open_engine_host
from trinamo.runtime.engines.loop.step import StepEngine
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import ConfigError
from trinamo.runtime.process.roles import serve_worker
from trinamo.runtime.process.settings import PREFILL_TOKENS_LOCAL_MAX, write_setting
from trinamo.runtime.process.stopping import StopRequest
from trinamo.runtime.protocol.discovery.candidates import Policy
from trinamo.runtime.protocol.openai.generate import GenerateRequest


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [make_engine, make_engine_of_own_memory])
@pytest.mark.parametrize("length", [33, 48, 200])
async def test_a_long_prompt_is_computed_elsewhere_and_answered_alike(
    mode: str, length: int, make: Callable[[], StepEngine]
) -> None:
    """Whoever made the memory that the blocks are moved from and to."""
    request = prompt(length)
    async with open_workers("decode", "prefill", make=make, disaggregation__mode=mode) as workers:
        with trio.fail_after(120):
            answered = await workers.ask(request)
        decode, prefill = workers.of("decode"), workers.of("prefill")

        assert tokens(answered) == await alone(request)
        assert answered[0].prompt_tokens == length
        assert decode.prompt_tokens == 0
        assert prefill.prompt_tokens == length
        assert decode.prefills("remote", "long_prompt", mode) == 1
        await workers.wait_blocks_free()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", [each.value for each in Policy])
async def test_a_prefill_worker_is_found_whatever_the_policy(mode: str, policy: str) -> None:
    """Clients that name who answers name nobody who computes their prompts."""
    changed: dict[str, Any] = {"disaggregation__mode": mode, "router__policy": policy}
    async with open_workers("decode", "prefill", **changed) as workers:
        with trio.fail_after(120):
            await workers.ask(prompt(48))
        decode = workers.of("decode")
        assert decode.prefills("remote", "long_prompt", mode) == 1


async def test_a_short_prompt_is_computed_here_and_the_bound_can_be_changed() -> None:
    request = prompt(32)
    async with open_workers("decode", "prefill") as workers:
        decode = workers.of("decode")
        assert tokens(await workers.ask(request)) == await alone(request)
        assert decode.prefills("local", "short_prompt", "decode_first") == 1

        assert decode.runtime is not None
        control = decode.runtime.control
        # The blocks that are here already count for nothing.
        await write_setting(control, PREFILL_TOKENS_LOCAL_MAX.name, "0")
        await decode.runtime.settings.wait_change(PREFILL_TOKENS_LOCAL_MAX, -1)
        other = prompt(32, offset=1)
        assert tokens(await workers.ask(other)) == await alone(other)
        assert decode.prefills("remote", "long_prompt", "decode_first") == 1


@pytest.mark.parametrize("mode", MODES)
async def test_a_prompt_that_came_from_elsewhere_is_found_when_it_is_asked_again(mode: str) -> None:
    """So are the blocks of its answer: only what does not fill a block is computed again."""
    request = prompt(200)
    async with open_workers("decode", "prefill", disaggregation__mode=mode) as workers:
        decode, prefill = workers.of("decode"), workers.of("prefill")
        first, second = [await workers.ask(request) for _ in range(2)]
        assert tokens(first) == tokens(second) == await alone(request)
        # What came from elsewhere was not here, and is the second time.
        assert (first[0].cached_tokens, second[0].cached_tokens) == (0, 200 - BLOCK_TOKENS)

        assert decode.prefills("remote", "long_prompt", mode) == 1
        assert decode.prefills("local", "short_prompt", mode) == 1
        assert decode.prompt_tokens == BLOCK_TOKENS
        assert prefill.prompt_tokens == 200
        await workers.wait_blocks_free()


@pytest.mark.parametrize("mode", MODES)
async def test_an_answer_goes_on_behind_tokens_that_were_delivered(mode: str) -> None:
    """What a migrated request brings with it is computed elsewhere, too, and counted as before."""
    request = prompt(100)
    whole = await alone(request)
    again = msgspec.structs.replace(request, delivered_ids=whole[:5])
    async with open_workers("decode", "prefill", disaggregation__mode=mode) as workers:
        answered = await workers.ask(again)

        assert workers.of("decode").prefills("remote", "long_prompt", mode) == 1
        assert tokens(answered) == whole[5:]
        assert answered[0].prompt_tokens == 100


@pytest.mark.parametrize("mode", MODES)
async def test_no_token_ends_an_answer_early_whoever_makes_the_first(mode: str) -> None:
    """The prefill worker's, which is one that may not end it, or does."""
    ends = [*b"abcdefghijklm .,-';\n"]
    async with open_workers("decode", "prefill", disaggregation__mode=mode) as workers:
        for least in (0, 1, 4):
            request = msgspec.structs.replace(
                prompt(60, offset=least), min_tokens=least, stop_token_ids=ends
            )
            found = tokens(await workers.ask(request))
            assert found == await alone(request)
            assert least < len(found) < 12
            assert [each in ends for each in found].index(True) == len(found) - 1
        assert workers.of("decode").prefills("remote", "long_prompt", mode) == 3
        told = msgspec.structs.replace(prompt(60, offset=9), prompt_logprobs=1)
        answered = await workers.ask(told)
        assert len(answered[0].prompt_logprobs) == 60
        assert workers.of("decode").prefills("local", "logprobs", mode) == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_role_that_the_engine_cannot_play_is_refused_at_the_start(role: str) -> None:
    section = config(worker__role=role)
    async with open_echo_engine() as engine:
        with pytest.raises(ConfigError, match=f"worker.role is {role}.*echo"):
            await serve_worker(
                section, RealEnv(), OneProcess(), engine, StopRequest(), ready=lambda _: None
            )
    closed = config(worker__role=role, data_plane__transfer__enabled=False)
    async with open_engine_host(make_engine()) as host:
        with pytest.raises(ConfigError, match=r"data_plane\.transfer\.enabled"):
            await serve_worker(
                closed, RealEnv(), OneProcess(), host, StopRequest(), ready=lambda _: None
            )
    unnamed = make_engine()
    unnamed.info = attrs.evolve(unnamed.info, kv_fingerprint="")
    async with open_engine_host(unnamed) as host:
        with pytest.raises(ConfigError, match=rf"{role}.*kv_fingerprint.*is empty.*Set it"):
            await serve_worker(
                section, RealEnv(), OneProcess(), host, StopRequest(), ready=lambda _: None
            )
    async with open_engine_host(TextOnly()) as host:
        with pytest.raises(ConfigError, match=f"{role}.*`encode`.*request.token_ids"):
            await serve_worker(
                section, RealEnv(), OneProcess(), host, StopRequest(), ready=lambda _: None
            )


class TextOnly(ExactEngine):
    """As an engine whose author knows prompts of text alone."""

    def encode(self, request: GenerateRequest) -> list[int]:
        return list(request.text.encode())
