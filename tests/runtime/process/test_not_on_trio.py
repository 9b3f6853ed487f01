"""Whoever runs on asyncio is told how to go on, not what broke inside."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, trinamo, trio

async def connect():
    async with trinamo.connect(trinamo.load_config(environ={})):
        pass

async def cell_of_a_notebook():
    trio.run(connect)

try:
    asyncio.run(PROGRAM())
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("program", "words"),
    [("connect", "asyncio runs here"), ("cell_of_a_notebook", "inside an asyncio loop here")],
)
def test_asyncio_is_told_what_to_call(program: str, words: str) -> None:
    """In a process of its own: where trio-asyncio was imported, asyncio's own functions are others."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("PROGRAM", program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "trinamo needs trio, and" in done.stdout
    assert words in done.stdout
    assert "await asyncio.to_thread(trio.run, main)" in done.stdout
