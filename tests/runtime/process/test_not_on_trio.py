"""Whoever runs on asyncio is told how to go on, not what broke inside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import trio

import trinamo


async def connect() -> None:
    async with trinamo.connect(trinamo.load_config(environ={})):
        pass


async def a_cell_of_a_notebook() -> None:
    trio.run(connect)


@pytest.mark.parametrize("program", [connect, a_cell_of_a_notebook])
def test_asyncio_is_told_what_to_call(program: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with pytest.raises(RuntimeError, match=r"trio, and .*asyncio.*await asyncio\.to_thread\(trio"):
        asyncio.run(program())
