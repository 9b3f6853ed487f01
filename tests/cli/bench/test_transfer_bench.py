"""`trinamo bench transfer`: what it measures is compared, and what it cannot measure is said."""

from __future__ import annotations

import io
import json
from pathlib import Path
from xml.etree import ElementTree as ET

import attrs
import numpy as np
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from tests.cli.places import Place
from trinamo.cli.bench import transfer as command, transfer_roles as roles
from trinamo.cli.bench.transfer_text import TransferRow, rows_json, rows_svg, show

GOOD = TransferRow("tcp", "read", 3.0, 3.5, 0.2, 0.1, 0.5, 170.0, is_good=True)
OTHER = attrs.evolve(GOOD, direction="write", gb_per_s=1.5, mover_s_per_gb=0.4)
AWAY = TransferRow("nixl <cma>", "", problem="NIXL & UCX cannot be loaded")
WRONG = attrs.evolve(GOOD, backend="mooncake tcp", is_good=False)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def invoke(*arguments: str) -> tuple[int, str]:
    """The command in this process, for what is refused before anything is started."""
    found = CliRunner().invoke(command.bench_app, ["transfer", *arguments])
    return found.exit_code, found.output


def table(*rows: TransferRow) -> str:
    text = io.StringIO()
    show(rows, Console(file=text, width=130), "what")
    return text.getvalue()


# --- what is shown --------------------------------------------------------------------------------


def test_the_table_says_of_every_row_whether_its_bytes_were_verified() -> None:
    said = table(GOOD, WRONG, AWAY)
    assert said.count("verified") == 1
    assert said.count("WRONG") == 1
    assert "nixl <cma> is not here: NIXL & UCX cannot be loaded" in said


def test_bars_are_as_long_as_their_figures() -> None:
    lines = [line for line in table(GOOD, OTHER, AWAY).splitlines() if "█" in line]
    assert [line.count("█") for line in lines] == [40, 20]


def test_the_picture_is_svg_without_anything_from_elsewhere() -> None:
    text = rows_svg([GOOD, OTHER, WRONG, AWAY], "blocks < & >")
    root = ET.fromstring(text)
    kinds = {each.tag.rpartition("}")[2] for each in root.iter()}
    assert kinds == {"svg", "rect", "text"}
    assert "href" not in text
    words = [each.text for each in root.iter() if each.text and each.text.strip()]
    assert "blocks < & >" in words
    assert "nixl <cma>: not here: NIXL & UCX cannot be loaded" in words
    assert "WRONG BYTES: mooncake tcp read" in words


def test_bars_of_the_picture_are_as_long_as_their_figures() -> None:
    root = ET.fromstring(rows_svg([GOOD, OTHER], "it"))
    bars = [each.attrib for each in root.iter() if "fill-opacity" in each.attrib]
    rates = [float(each["width"]) for each in bars if each["x"] == "214"]
    assert rates == pytest.approx([320, 320, 160, 160])
    cpu = [float(each["width"]) for each in bars if each["x"] == "620"]
    assert cpu == pytest.approx([320 * 0.6, 320 * 0.4, 320, 320 * 0.8], abs=0.1)


def test_a_picture_of_nothing_measured_is_a_picture() -> None:
    assert ET.fromstring(rows_svg([AWAY], "it")).tag.endswith("svg")
    assert ET.fromstring(rows_svg([], "it")).tag.endswith("svg")


def test_json_has_what_was_asked_for_and_every_figure() -> None:
    said = json.loads(rows_json([GOOD, AWAY], blocks=7, rounds=2))
    assert (said["blocks"], said["rounds"]) == (7, 2)
    assert said["rows"][0] == attrs.asdict(GOOD)
    assert said["rows"][1]["problem"]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--backend", "infiniband"], "none of"),
        (["--blocks", "65536", "--block-bytes", "67108864"], "more than 4 GiB"),
        (["--plot", "it.png"], "it.svg"),
        (["--plot", "/no/such/folder/it.svg"], "there is no folder"),
        (["--blocks", "0"], "blocks"),
    ],
)
def test_usage_that_cannot_be_meant_is_refused_before_anything_starts(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "Peer", None)
    code, output = invoke(*arguments)
    assert code == 2
    assert said in " ".join(output.replace("│", " ").split())


def test_wrong_bytes_are_a_failure() -> None:
    command._judge([GOOD, AWAY], named=False)
    for rows, named in (([GOOD, WRONG], False), ([GOOD, AWAY], True)):
        with pytest.raises(typer.Exit) as found:
            command._judge(rows, named=named)
        assert found.value.exit_code == 1


def test_one_wrong_byte_or_a_block_in_the_wrong_place_is_seen() -> None:
    ours, theirs = roles._Memory.of(1, 8, 4096), roles._Memory.of(2, 8, 4096)
    sources, targets = roles._lists(8, 5)
    ours.blocks[targets] = theirs.blocks[sources]
    assert roles._is_as_sent(ours, 2, 5)
    ours.blocks[targets[3], 17] ^= 1
    assert not roles._is_as_sent(ours, 2, 5)
    ours.blocks[targets] = np.roll(theirs.blocks[sources], 1, axis=0)
    assert not roles._is_as_sent(ours, 2, 5)


# --- for real -------------------------------------------------------------------------------------


def test_both_directions_are_measured_between_two_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "_SMALL_ROUNDS", 3)
    noted: list[str] = []
    rows = command.measure(["tcp"], count=16, block_bytes=8192, rounds=2, note=noted.append)
    assert noted == ["tcp", "tcp read", "tcp write"]
    assert [(row.backend, row.direction) for row in rows] == [("tcp", "read"), ("tcp", "write")]
    for row in rows:
        assert not row.problem
        assert row.is_good
        assert row.best_gb_per_s >= row.gb_per_s > 0
        assert row.block_us > 0


def test_a_backend_that_is_not_here_is_a_row_with_its_reason_and_a_failure_if_it_was_named(
    place: Place, tmp_path: Path
) -> None:
    for module in ("nixl_cu12", "nixl_cu13"):
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").write_text("raise ImportError('not today')\n")
    without = Place(tmp_path, {"PYTHONPATH": str(tmp_path)})
    done = without.run("bench", "transfer", "--backend", "nixl cma", "--json")
    assert done.returncode == 1
    (row,) = json.loads(done.stdout)["rows"]
    assert row["problem"].startswith("NIXL cannot be loaded: not today")
    assert "nixl cma cannot be measured here" in done.stderr
    assert "trinamo doctor" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_process_that_dies_is_a_reason_and_not_a_hang() -> None:
    peer = command.Peer("owner", "tcp", "16", "4096")
    try:
        assert peer.wait_ready()["description"]
        peer._process.kill()
        peer._process.wait()
        with pytest.raises(RuntimeError, match="status -9"):
            peer.ask("cpu")
    finally:
        peer.close()


def test_what_a_process_says_before_it_ends_is_the_reason() -> None:
    peer = command.Peer("owner", "tcp", "16", "0")
    try:
        with pytest.raises(RuntimeError, match="blocks of 0 bytes"):
            peer.wait_ready()
    finally:
        peer.close()
