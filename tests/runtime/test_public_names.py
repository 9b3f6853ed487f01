"""The names of `import trinamo`: all there, listed once, and free until they are used."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest

import trinamo

NAMES: list[str] = dir(trinamo)


def loaded_by(code: str) -> set[str]:
    """The modules that an interpreter of its own has after `code`."""
    code = f"import sys; before = set(sys.modules); {code}; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_every_public_name_is_there() -> None:
    assert len(NAMES) > 50
    for name in NAMES:
        assert getattr(trinamo, name) is not None


def test_a_star_import_brings_them_all() -> None:
    found: dict[str, Any] = {}
    exec("from trinamo import *", found)

    assert set(NAMES) == found.keys() - {"__builtins__"}


def test_the_stub_says_what_type_checkers_know() -> None:
    """Each error is public, and so is whatever else the tree has later."""
    errors = importlib.import_module("trinamo.runtime.errors")
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}

    assert {name for name in classes if name.endswith("Error")} <= set(NAMES)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        getattr(trinamo, "nonsense")  # noqa: B009 -- type checkers know that it is not there


def test_importing_trinamo_loads_nothing_else_of_it() -> None:
    found = loaded_by("import trinamo, trinamo.runtime")

    assert {name for name in found if name.startswith("trinamo")} == {"trinamo", "trinamo.runtime"}
    assert not found & {"trio", "msgspec", "attrs", "numpy"}


def test_the_errors_come_without_the_rest() -> None:
    assert "trio" not in loaded_by("from trinamo import TrinamoError")


async def test_streams_and_metadata_need_no_other_names_than_public_ones() -> None:
    """A caller's end of a call-home stream, and what an engine publishes of its memory."""
    async with trinamo.open_stream_server(trinamo.TcpOptions(), trinamo.RealEnv()) as server:
        with server.register(trinamo.Context("r-1")) as registered:
            assert registered.connection.address == server.address
    memory = {"control_plane.backend": "memory", "event_plane.backend": "memory"}
    config = trinamo.load_config(environ={}, overrides=memory)
    async with trinamo.open_runtime(config, serving=True) as runtime:
        store = trinamo.NixlMetadataStore("mine", runtime.control)
        told = trinamo.NixlMetadata(engine_id="e1", agent_name="a1", memory_descriptors={})
        lease = await runtime.control.grant_lease(10)
        await store.put("e1", told, lease_id=lease.id)

        assert await store.get("e1") == told
        with pytest.raises(trinamo.MetadataNotFoundError):
            await store.get("e2")
