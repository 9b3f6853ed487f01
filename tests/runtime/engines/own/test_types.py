"""What `@trinamo.engine` is told of a function by its types; `make types` looks at this file, too."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

import trinamo
from tests.runtime.engines.own.test_definition import answer_of
from trinamo import Context, EngineError, GenerateRequest


async def test_type_checkers_refuse_an_engine_of_numbers_and_so_does_the_answer() -> None:
    async def numbers(request: GenerateRequest, context: Context) -> AsyncGenerator[int, None]:
        yield 4

    with pytest.raises(EngineError, match="yielded an item of type int"):
        await answer_of(trinamo.engine(numbers))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
