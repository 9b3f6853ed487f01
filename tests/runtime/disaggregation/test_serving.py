"""Prompts that prefill workers compute give the tokens that one engine alone gives, in both modes."""

from __future__ import annotations

import pytest
import trio

from tests.runtime.disaggregation.serving import MODES, alone, open_workers, prompt, tokens

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [33, 48, 200])
async def test_a_long_prompt_is_computed_elsewhere_and_answered_alike(
    mode: str, length: int
) -> None:
    request = prompt(length)
    async with open_workers("decode", "prefill", disaggregation__mode=mode) as workers:
        with trio.fail_after(20):
            answered = await workers.ask(request)
        decode, prefill = workers.of("decode"), workers.of("prefill")

        assert tokens(answered) == await alone(request)
        assert answered[0].prompt_tokens == length
        assert decode.prompt_tokens == 0
        assert prefill.prompt_tokens == length
        assert decode.prefills("remote", "long_prompt", mode) == 1
        await workers.wait_blocks_free()
