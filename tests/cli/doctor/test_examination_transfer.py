"""What `trinamo doctor` finds about moving KV blocks, on machines made of folders."""

from __future__ import annotations

import resource
from pathlib import Path

import attrs
import pytest

from tests import needs
from trinamo.cli.doctor.finding import Finding, FindingVerdict
from trinamo.cli.doctor.library import LIBRARIES, Loaded, load, parse_transports
from trinamo.cli.doctor.transfer import MachinePaths, transfer_findings
from trinamo.runtime.config.config import load_config

HOME_LIKE = Loaded(text="nixl-cu12 1.5.1 loads", transports=("tcp (lo)", "cma", "self"))
PORT = {
    "state": "4: ACTIVE",
    "phys_state": "5: LinkUp",
    "rate": "100 Gb/sec (4X EDR)",
    "link_layer": "InfiniBand",
    "lid": "0x12",
    "sm_lid": "0x1",
}


@pytest.fixture
def machine(tmp_path: Path) -> MachinePaths:
    """One without RDMA on which everything loads."""
    (tmp_path / "sys/net/lo").mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    return MachinePaths(
        sys_class=tmp_path / "sys",
        dev=tmp_path / "dev",
        find_library=lambda name: f"lib{name}.so",
        find_tool=lambda name: f"/usr/bin/{name}",
        load=lambda _: HOME_LIKE,
        environ={},
        locked_bytes_max=resource.RLIM_INFINITY,
    )


def add_device(machine: MachinePaths, name: str = "mlx5_0", **port: str) -> None:
    device = machine.sys_class / "infiniband" / name
    folder = device / "ports" / "1"
    folder.mkdir(parents=True)
    for file, text in {**PORT, **port}.items():
        (folder / file).write_text(f"{text}\n")
    (device / "node_type").write_text("1: CA\n")
    (device / "fw_ver").write_text("16.35.2000\n")
    (device / "node_guid").write_text("0c42:a103:0065:1234\n")
    (machine.dev / "infiniband").mkdir(exist_ok=True)
    (machine.dev / "infiniband" / "uverbs0").touch()


def examine(machine: MachinePaths, **settings: object) -> dict[str, Finding]:
    overrides = {f"data_plane.{key.replace('__', '.')}": value for key, value in settings.items()}
    found = list(transfer_findings(load_config(overrides=overrides), machine))
    assert len({each.what for each in found}) == len(found)
    return {each.what: each for each in found}


def test_without_rdma_nothing_is_missing_and_each_row_says_what_is_used(
    machine: MachinePaths,
) -> None:
    found = examine(machine)
    assert FindingVerdict.MISSING not in {each.verdict for each in found.values()}
    assert found["RDMA devices"].verdict is FindingVerdict.NOTE
    assert "over TCP" in found["RDMA devices"].text
    assert found["UCX transports"].text == "tcp (lo), cma, self; none over RDMA"
    assert "RDMA tools" not in found


def test_a_port_is_told_as_ibstat_does(machine: MachinePaths) -> None:
    add_device(machine)
    found = examine(machine)["RDMA mlx5_0:1"]
    assert found.verdict is FindingVerdict.GOOD
    for words in ("ACTIVE", "LinkUp", "100 Gb/sec (4X EDR)", "InfiniBand", "CA", "16.35.2000"):
        assert words in found.text
    assert "LID 0x12, SM LID 0x1" in found.text


@pytest.mark.parametrize(
    ("port", "remedy"),
    [
        ({"state": "1: DOWN", "phys_state": "3: Disabled"}, "check the cable"),
        ({"state": "2: INIT"}, "opensm"),
        ({"state": "1: DOWN", "link_layer": "Ethernet"}, "ip link set"),
    ],
)
def test_a_port_that_is_not_active_comes_with_what_to_do(
    machine: MachinePaths, port: dict[str, str], remedy: str
) -> None:
    add_device(machine, **port)
    found = examine(machine)["RDMA mlx5_0:1"]
    assert found.verdict is FindingVerdict.WARNING
    assert remedy in found.remedy


def test_files_of_a_device_that_cannot_be_read_are_unknown(machine: MachinePaths) -> None:
    add_device(machine)
    port = machine.sys_class / "infiniband/mlx5_0/ports/1"
    (port / "rate").unlink()
    (port / "link_layer").write_bytes(b"\xff\xfe")
    assert "unknown" in examine(machine)["RDMA mlx5_0:1"].text


def test_a_device_that_no_file_opens_is_a_warning_or_missing_if_it_is_needed(
    machine: MachinePaths,
) -> None:
    add_device(machine)
    (machine.dev / "infiniband" / "uverbs0").unlink()
    assert examine(machine)["RDMA access"].verdict is FindingVerdict.WARNING
    needed = examine(machine, mooncake__enabled=True, mooncake__protocol="rdma")["RDMA access"]
    assert needed.verdict is FindingVerdict.MISSING
    assert "--device=/dev/infiniband" in needed.remedy


def test_rdma_that_is_configured_and_not_there_is_missing(machine: MachinePaths) -> None:
    found = examine(machine, mooncake__enabled=True, mooncake__protocol="rdma")
    assert found["RDMA devices"].verdict is FindingVerdict.MISSING
    assert "modprobe" in found["RDMA devices"].remedy


def test_the_device_that_nixl_is_told_is_looked_for(machine: MachinePaths) -> None:
    given = {"nixl__enabled": True, "nixl__rdma_interface": "mlx5_0"}
    found = examine(machine, **given)["NIXL's device"]
    assert found.verdict is FindingVerdict.MISSING
    assert "there is no device 'mlx5_0'" in found.text
    add_device(machine)
    found = examine(machine, **given)["NIXL's device"]
    assert (found.verdict, found.text) == (FindingVerdict.GOOD, "mlx5_0:1 (RDMA)")
    unnamed = examine(machine, nixl__enabled=True)["NIXL's device"]
    assert unnamed.verdict is FindingVerdict.WARNING
    assert "this host only" in unnamed.text


def test_what_mooncake_would_really_run_over_is_said(machine: MachinePaths) -> None:
    def path(environ: dict[str, str], **given: object) -> Finding:
        there = attrs.evolve(machine, environ=environ)
        return examine(there, mooncake__enabled=True, **given)["Mooncake's path"]

    assert (path({}).verdict, path({}).text) == (FindingVerdict.GOOD, "tcp")
    rdma = {"mooncake__protocol": "rdma"}
    assert path({}, **rdma).verdict is FindingVerdict.MISSING
    add_device(machine)
    assert path({}, **rdma).text == "rdma"
    assert path({"MC_FORCE_TCP": "1"}, **rdma).verdict is FindingVerdict.WARNING
    opposite = path({"MC_FORCE_TCP": "0"}, **rdma)
    assert opposite.verdict is FindingVerdict.MISSING
    assert "MC_FORCE_TCP=0" in opposite.text
    assert path({}, **rdma, mooncake__device="mlx5_7").verdict is FindingVerdict.MISSING


def test_the_limit_of_locked_memory_matters_where_there_is_rdma(machine: MachinePaths) -> None:
    assert examine(machine)["locked memory"].text == "unlimited"
    small = attrs.evolve(machine, locked_bytes_max=65_536)
    assert examine(small)["locked memory"].verdict is FindingVerdict.NOTE
    add_device(small)
    found = examine(small)["locked memory"]
    assert found.verdict is FindingVerdict.WARNING
    assert "65536 bytes" in found.text
    for way in ("ulimit -l", "LimitMEMLOCK", "memlock=-1"):
        assert way in found.remedy


def test_ucx_without_rdma_is_a_warning_where_there_is_a_device(machine: MachinePaths) -> None:
    add_device(machine)
    assert examine(machine)["UCX transports"].verdict is FindingVerdict.WARNING
    loaded = attrs.evolve(HOME_LIKE, transports=("rc_mlx5 (mlx5_0:1)", "tcp (lo)", "cma"))
    good = examine(attrs.evolve(machine, load=lambda _: loaded))["UCX transports"]
    assert (good.verdict, good.text) == (FindingVerdict.GOOD, "rc_mlx5 (mlx5_0:1), tcp (lo), cma")


def test_the_tools_of_a_fabric_are_named_by_their_packages(machine: MachinePaths) -> None:
    add_device(machine)
    assert examine(machine)["RDMA tools"].verdict is FindingVerdict.GOOD
    found = examine(attrs.evolve(machine, find_tool=lambda _: None))["RDMA tools"]
    assert "ib_write_bw, ib_write_lat" in found.text
    assert found.verdict is FindingVerdict.NOTE
    assert found.remedy == "apt-get install infiniband-diags perftest"


@pytest.mark.parametrize(
    ("is_enabled", "verdict"), [(False, FindingVerdict.NOTE), (True, FindingVerdict.MISSING)]
)
def test_a_library_that_is_not_there_is_missing_only_if_it_is_configured(
    machine: MachinePaths, is_enabled: bool, verdict: FindingVerdict
) -> None:
    bare = attrs.evolve(
        machine,
        find_library=lambda _: None,
        load=lambda name: Loaded(problem=f"{name} cannot be loaded: No module named 'it'"),
    )
    found = examine(bare, nixl__enabled=is_enabled, mooncake__enabled=is_enabled)
    for name in ("NIXL", "Mooncake"):
        assert found[name].verdict is verdict
        assert "over TCP" in found[name].text
        assert found[name].remedy == LIBRARIES[name].install
    assert found["verbs library"].verdict is verdict
    assert "UCX transports" not in found


def test_a_shared_library_that_is_not_there_is_named_by_its_package() -> None:
    words = "{}: cannot open shared object file: No such file or directory"
    known = LIBRARIES["Mooncake"].remedy(words.format("libibverbs.so.1"))
    assert known == "apt-get install --no-install-recommends libibverbs1"
    unknown = LIBRARIES["Mooncake"].remedy(words.format("libodd.so.3"))
    assert unknown == "install the package that contains libodd.so.3"


def test_the_table_of_ucx_is_read_and_other_lines_are_not() -> None:
    lines = [
        "[1.5] [vm:1:0]   | Type       | Component | Transport | Device (System device)  |",
        "[1.5] [vm:1:0]   | network    | tcp       | + tcp     | - eth0  + lo            |",
        "[1.5] [vm:1:0]   |            | ib        | + rc_mlx5 | + mlx5_0:1              |",
        "[1.5] [vm:1:0]   | intra-node | cma       | + cma     | + memory                |",
        "[1.5] [vm:1:0]   | Legend: + = enabled, - = disabled |",
        "",
        "|||||",
    ]
    assert parse_transports(lines) == ("tcp (eth0, lo)", "rc_mlx5 (mlx5_0:1)", "cma")


# --- for real -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(LIBRARIES))
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ImportError('libibverbs.so.1: cannot open shared object file')", "libibverbs.so.1"),
        ("import os; os._exit(9)", "its process ended with status 9"),
        ("import os; os.abort()", "its process ended by SIGABRT"),
        ("import os; os.kill(os.getpid(), 11)", "its process ended by SIGSEGV"),
    ],
)
def test_a_library_that_fails_in_any_way_does_not_take_the_doctor_with_it(
    name: str, source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("nixl_cu12", "nixl_cu13", "mooncake"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(source + "\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = load(name)
    assert said in found.problem
    assert not found.text


def test_a_crash_of_nixl_has_a_remedy_of_its_own() -> None:
    """UCX crashes with the providers of Debian 12, so another NIXL would not help."""
    nixl = LIBRARIES["NIXL"]
    assert "ibverbs-providers" in nixl.remedy("its process ended by SIGSEGV")
    assert nixl.remedy("its process ended by SIGABRT") == nixl.install


def test_nixl_lists_the_transports_that_ucx_has_here() -> None:
    needs.NIXL.imported()
    needs.needs_nixl_that_ends()
    found = load("NIXL")
    assert not found.problem
    assert any(each.startswith("tcp (") for each in found.transports)
    assert "self" in found.transports


def test_mooncake_says_its_version() -> None:
    needs.MOONCAKE.imported()
    assert load("Mooncake").text.startswith("mooncake ")
