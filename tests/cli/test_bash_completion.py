"""`trinamo completion bash`, sourced by a real bash that a real terminal types into."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from tests.cli.places import Place

ENGINE = """\
import trinamo

@trinamo.engine
async def parrot(request, context):
    yield "x"
"""
PROMPT = "ready> "
TIMEOUT_S = 60.0


@attrs.define
class Bash:
    """An interactive shell. `line` types, presses Tab, and tells what stands on the line then."""

    terminal: int
    shown: str = ""

    def read_until(self, text: str) -> str:
        """What has come up to and with `text`; the rest stays to be read."""
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self.shown:
            left_s = deadline - time.monotonic()
            assert left_s > 0, self.shown
            if select.select([self.terminal], [], [], left_s)[0]:
                self.shown += os.read(self.terminal, 65_536).decode("utf-8", "replace")
        found, _, self.shown = self.shown.partition(text)
        return found

    def line(self, text: str) -> str:
        """The line after Tab. It is not run: a mark at its end shows that Tab has done its work."""
        os.write(self.terminal, f"{text}\t=end".encode())
        found = self.read_until("=end")
        os.write(self.terminal, b"\x15")  # Clears the line.
        os.write(self.terminal, b"echo done\n")
        self.read_until("done\r\n")
        self.read_until(PROMPT)
        return found.replace("\a", "")


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bash]:
    place = Place(tmp_path_factory.mktemp("bash"))
    (place.root / "mine.py").write_text(ENGINE)
    (place.root / "cluster.yaml").write_text("{}")
    scripts = Path(sys.executable).parent
    environ = {**place.environ, "PATH": f"{scripts}:{os.environ['PATH']}", "PS1": PROMPT}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environ, "TERM": "dumb", "COLUMNS": "200"},
        cwd=place.root,
        start_new_session=True,
    )
    os.close(theirs)
    shell = Bash(ours)
    try:
        shell.read_until(PROMPT)
        os.write(
            ours, b"bind 'set enable-bracketed-paste off'; source <(trinamo completion bash)\n"
        )
        shell.read_until(PROMPT)
        yield shell
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("trinamo work", "trinamo worker "),
        ("trinamo up --nats-p", "trinamo up --nats-port "),
        ("trinamo queue requ", "trinamo queue requeue "),
        ("trinamo config set router.pol", "trinamo config set router.policy "),
        (
            "trinamo config set router.policy power",
            "trinamo config set router.policy power_of_two ",
        ),
        ("trinamo up --engine ex", "trinamo up --engine exact "),
        ("trinamo up --engine mine.py:", "trinamo up --engine mine.py:parrot "),
        ("trinamo up --set http.reuse", "trinamo up --set http.reuse_port="),
        ("trinamo up --set http.reuse_port=t", "trinamo up --set http.reuse_port=true "),
        ("trinamo up --set log.level=deb", "trinamo up --set log.level=debug "),
        ("trinamo up --config clus", "trinamo up --config cluster.yaml "),
        ("trinamo sim replay clus", "trinamo sim replay cluster.yaml "),
        ("trinamo completion f", "trinamo completion fish "),
        ("trinamo status", "trinamo status "),
    ],
)
def test_tab_completes(bash: Bash, typed: str, completed: str) -> None:
    assert bash.line(typed) == completed
