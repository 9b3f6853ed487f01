"""What a program may say to `Caller.generate`, as its types and as its errors."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest

from trinamo import GenerateOptions, GenerateRequest
from trinamo.transports.assembly.calling import _request_of


def test_the_options_are_fields_of_a_request_with_their_types() -> None:
    fields, options = get_type_hints(GenerateRequest), get_type_hints(GenerateOptions)
    assert options.items() <= fields.items()
    travelling = {"model", "messages", "prompt", "token_ids", "tenant", "opening", "body", "path"}
    travelling |= {"passed", "task"} | {name for name in fields if name.startswith("delivered_")}
    assert set(fields) - set(options) == travelling


@pytest.mark.parametrize("prompt", [42, None])
def test_what_is_no_prompt_is_a_sentence(prompt: Any) -> None:
    with pytest.raises(TypeError, match="a prompt is text, a list of ChatMessage"):
        _request_of(prompt, "", {})
