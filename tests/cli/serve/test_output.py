"""A serving process's output: nobody waits for its reader, and what is lost is told."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinamo.cli.serve.output import TextOutput

PIPE_BYTES = 4096


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe as small as can be: reader, writer."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield reader, writer
    for fd in (reader, writer):
        os.close(fd)


def read_lines(reader: int, last: str) -> list[str]:
    """Lines up to `last`."""
    data = b""
    while not data.endswith(f"{last}\n".encode()):
        data += os.read(reader, 65_536)
    return data.decode().splitlines()


def test_what_is_written_arrives_in_order(pipe: tuple[int, int]) -> None:
    output = TextOutput(pipe[1])

    for number in range(10):
        print("line", number, file=output)

    assert read_lines(pipe[0], "line 9") == [f"line {number}" for number in range(10)]
    assert output.drain(5)
    output.close()


def test_a_writer_never_waits_and_the_losses_are_told_where_they_were(
    pipe: tuple[int, int],
) -> None:
    """Without the thread this test would hang at the 4,097th byte."""
    output = TextOutput(pipe[1], bytes_max=20_000)

    for number in range(3000):
        output.write(f"line {number}\n")
    assert not output.drain(0)
    lines = read_lines(pipe[0], "line 2999")

    counts = [int(line.split()[0]) for line in lines if "were dropped, because" in line]
    numbers = [int(line.split()[1]) for line in lines if line.startswith("line")]
    assert counts
    assert sum(counts) == output.lines_dropped == 3000 - len(numbers)
    assert numbers == sorted(numbers)
    gap = next(at for at, line in enumerate(lines) if "were dropped" in line)
    assert numbers[gap] - (numbers[gap - 1] if gap else -1) - 1 == counts[0]
    output.close()


def test_a_reader_that_has_gone_is_no_error(pipe: tuple[int, int]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    output = TextOutput(writer)

    output.write("one\n")
    assert output.drain(5)
    output.write("two\n")

    assert output.lines_dropped == 1
    output.close()
    os.close(writer)


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    """What was written meanwhile comes once there is room, the oldest lines left out if they were many."""
    fd = os.open("/dev/full", os.O_WRONLY)
    output = TextOutput(fd, bytes_max=20_000)
    for number in range(3000):
        output.write(f"line {number}\n")
    assert not output.drain(0.1)
    with (tmp_path / "log").open("wb") as file:
        os.dup2(file.fileno(), fd)
    assert output.drain(10)
    lines = (tmp_path / "log").read_text().splitlines()
    told = [int(line.split()[0]) for line in lines if "were dropped" in line]
    assert told
    assert sum(told) == output.lines_dropped == 3000 - (len(lines) - len(told))
    assert lines[-1] == "line 2999"
    output.close()
    os.close(fd)


def test_a_file_that_is_copied_and_truncated_goes_on_at_its_beginning(tmp_path: Path) -> None:
    """As logrotate does it; the file is opened to be appended to."""
    log = tmp_path / "log"
    with log.open("ab") as file:
        output = TextOutput(file.fileno())
        print("before", file=output)
        assert output.drain(10)
        os.truncate(log, 0)
        print("after", file=output)
        assert output.drain(10)
    output.close()
    assert log.read_text() == "after\n"


def test_a_descriptor_that_another_process_made_non_blocking_is_waited_for(
    pipe: tuple[int, int],
) -> None:
    os.set_blocking(pipe[1], False)
    output = TextOutput(pipe[1])

    for number in range(500):
        output.write(f"line {number}\n")

    assert len(read_lines(pipe[0], "line 499")) == 500
    output.close()


def test_a_part_of_a_line_waits_for_the_rest_or_for_flush(pipe: tuple[int, int]) -> None:
    output = TextOutput(pipe[1])

    output.write("> ")
    assert not output._lines
    output.flush()

    assert os.read(pipe[0], 100) == b"> "
    output.close()


CRASH = """
import sys
from trinamo.cli.serve.output import unblock_output
unblock_output()
print("ready", flush=True)
for number in range(20_000):
    print("noise", number, file=sys.stderr)
raise RuntimeError("the cause")
"""


def test_the_cause_of_a_crash_is_the_last_that_is_told(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CRASH], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output, _ = process.communicate(timeout=60)

    assert process.returncode == 1
    assert output.startswith(b"ready")
    assert output.endswith(b"RuntimeError: the cause\n")


def test_a_process_whose_output_is_not_read_ends_all_the_same() -> None:
    reader, writer = os.pipe()
    with subprocess.Popen([sys.executable, "-c", CRASH], stdout=writer, stderr=writer) as process:
        os.close(writer)
        assert process.wait(120) == 1
    os.close(reader)
