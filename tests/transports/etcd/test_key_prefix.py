"""Clusters that share one etcd, each below a prefix of its own."""

from __future__ import annotations

import pytest
import trio
from msgspec.structs import replace

from tests.conformance.control.etcd_members import PATIENT
from tests.servers import SessionEtcd
from trinamo.runtime.config.config import load_config
from trinamo.runtime.errors import ConfigError
from trinamo.runtime.planes import Delete, Put, Snapshot
from trinamo.transports.etcd import EtcdControlPlane, open_etcd


async def keys_of(plane: EtcdControlPlane, prefix: str = "") -> list[str]:
    return [each.key for each in (await plane.range(prefix)).entries]


async def test_clusters_that_share_an_etcd_do_not_see_one_another(
    etcd_server: SessionEtcd,
) -> None:
    """Whatever they do, also to all that there is."""
    sections = [replace(PATIENT, key_prefix=f"shared/{name}/") for name in "ab"]
    async with (
        open_etcd(etcd_server.endpoint, sections[0]) as one,
        open_etcd(etcd_server.endpoint, sections[1]) as other,
        open_etcd(etcd_server.endpoint, PATIENT) as bare,
        one.watch("") as events,
    ):
        with trio.fail_after(120):
            assert isinstance(await anext(events), Snapshot)
            for plane in (one, other):
                await plane.put("config/x", b"1")
                assert (await plane.compare_and_put("config/y", b"1", mod_revision=0)).succeeded
            assert await keys_of(one) == await keys_of(other) == ["config/x", "config/y"]
            assert await keys_of(bare, "shared/") == [
                f"shared/{name}/config/{key}" for name in "ab" for key in "xy"
            ]
            found = await one.get("config/x")
            assert found is not None
            assert found.key == "config/x"
            assert await one.delete("config/x")
            assert await one.delete_prefix("") == 1
            assert await keys_of(other) == ["config/x", "config/y"]
            told = [await anext(events) for _ in range(4)]
            assert [each.entry.key for each in told if isinstance(each, Put)] == [
                "config/x",
                "config/y",
            ]
            assert [each.key for each in told if isinstance(each, Delete)] == [
                "config/x",
                "config/y",
            ]
            await bare.delete_prefix("shared/")


@pytest.mark.parametrize("wrong", ["team", "/", "a//", "a b/", "../é/"])
def test_a_prefix_is_folders_that_end_with_a_slash(wrong: str) -> None:
    overrides = {"control_plane.etcd.key_prefix": wrong}
    with pytest.raises(ConfigError, match="key_prefix"):
        load_config(environ={}, overrides=overrides)
