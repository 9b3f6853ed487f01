"""A headless Chromium over its debugging pipe: no port, no websocket, no driver."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1400,950",
    "--remote-debugging-pipe",
)
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


class Browser:
    """One page; `errors` collects what its console and its policy complain about."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer = b""
        self._count = 0
        self._session: str | None = None
        self._target: str | None = None
        self._origin: str | None = None
        self._loaded = False
        self.errors: list[str] = []

    def open(self, page: Path | str) -> None:
        """Load a file, or a URL, whose origin it may then ask."""
        url = page if isinstance(page, str) else page.as_uri()
        self._origin = "/".join(url.split("/")[:3]) if isinstance(page, str) else None
        if self._target is not None:
            # It would go on, and complain, behind the one that is looked at.
            self._session = None
            self.call("Target.closeTarget", targetId=self._target)
            self.errors.clear()
        self._target = target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self._loaded = False
        self.call("Page.navigate", url=url)
        while not self._loaded:
            self._take()
        # The picture is drawn in an animation frame after loading.
        self.settle()

    def settle(self) -> None:
        self.evaluate("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")

    def evaluate(self, expression: str) -> Any:
        done = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def press(self, key: str, *, code: int) -> None:
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more
            )
        self.settle()

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def call(self, method: str, **parameters: Any) -> Any:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._take()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def _take(self) -> Any:
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], deadline - time.monotonic())
            assert ready, "the browser does not answer"
            data = os.read(self._answers, 65_536)
            assert data, "the browser has gone"
            self._buffer += data
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(raw)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, parameters: Any) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"])[:500])
        elif method == "Log.entryAdded":
            self.errors.append(parameters["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.errors.append(json.dumps(parameters["args"])[:500])
        elif method == "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            is_own = self._origin is not None and url.startswith(f"{self._origin}/")
            if not (is_own or url.startswith(("file:", "data:", "about:"))):
                self.errors.append(f"asked the network for {url}")


@contextmanager
def browser() -> Iterator[Browser]:
    """A fresh browser with a profile of its own; ended and removed afterwards."""
    assert CHROMIUM is not None
    their_commands, our_commands = os.pipe()
    our_answers, their_answers = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # Chromium reads commands from descriptor 3 and answers on 4.
        # Moved out of the way first, since the pipes may be 3 and 4 the wrong way round.
        line = 'exec 8<&"$1" 9>&"$2"; shift 2; exec "$@" 3<&8 4>&9'
        process = subprocess.Popen(
            [
                "/bin/bash", "-c", line, "sh", str(their_commands), str(their_answers),
                CHROMIUM, *OPTIONS, f"--user-data-dir={profile}",
            ],
            pass_fds=(their_commands, their_answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(their_commands)
        os.close(their_answers)
        try:
            yield Browser(our_commands, our_answers)
        finally:
            os.close(our_commands)
            os.close(our_answers)
            process.terminate()
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
