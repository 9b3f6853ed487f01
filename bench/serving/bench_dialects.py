"""What one chat path costs in each of its forms: chat completions, responses and messages.

One frontend and one worker (`bench_http.py`), one connection, the same question in each form, in turns.
Told are the time from the question to the first event, and to the first token, and what a request costs
the frontend, as medians; the ratios are those of pairs that were asked one after the other.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
from bench_http import System, open_system
from load.load import TEXT

QUESTION = "Say it again, as often as you are asked to."
SAMPLING = {"model": "plain", "temperature": 0, "stream": True}
TURNS = [{"role": "user", "content": QUESTION}]
PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
BODIES = {
    "chat": {**SAMPLING, "messages": TURNS},
    "responses": {**SAMPLING, "input": QUESTION},
    "messages": {**SAMPLING, "messages": TURNS},
}
BOUNDS = {"chat": "max_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}


def is_whole(said: bytes) -> bool:
    """Whether an answer is complete: in chunks, or of a length, which short ones have."""
    head, found, rest = said.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    if length is None:
        return rest.endswith(b"0\r\n\r\n")
    return bool(found) and len(rest) >= int(length[1])


class Asker:
    """One connection, and what came of its requests."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._socket = socket.create_connection(("127.0.0.1", system.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, form: str, tokens: int) -> tuple[float, float]:
        """Seconds to the first event and to the first token of one whole answer."""
        body = json.dumps({**BODIES[form], BOUNDS[form]: tokens}).encode()
        head = (
            f"POST {PATHS[form]} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        )
        began = time.perf_counter()
        self._socket.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        said, event_s, token_s = b"", 0.0, 0.0
        while not is_whole(said):
            piece = self._socket.recv(1 << 16)
            if not piece:
                raise SystemExit(
                    f"{form}: the connection ended behind {said[:300]!r} {said[-200:]!r}"
                )
            said += piece
            if not event_s and b"data: " in said:
                event_s = time.perf_counter() - began
            if not token_s and TEXT.encode() in said:
                token_s = time.perf_counter() - began
            if said.startswith(b"HTTP/1.1 4"):
                raise SystemExit(f"{form}: {said[-400:].decode()}")
        return event_s, token_s

    def measure(self, form: str, requests: int, tokens: int) -> dict[str, float]:
        """Medians of so many requests, and the frontend's CPU for each of them."""
        frontend = self._system.sides["frontend"]
        cpu_s = frontend.cpu_s()
        told = [self.ask(form, tokens) for _ in range(requests)]
        return {
            "event_us": median(event_s for event_s, _ in told) * 1e6,
            "token_us": median(token_s for _, token_s in told) * 1e6,
            "cpu_us": (frontend.cpu_s() - cpu_s) / requests * 1e6,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--requests", type=int, default=100, help="of each form in each pair")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument(
        "--quick", action="store_true", help="hardly anything, to see that it works"
    )
    options = parser.parse_args()
    pairs, requests = (1, 5) if options.quick else (options.pairs, options.requests)
    found: dict[str, list[dict[str, float]]] = {form: [] for form in PATHS}
    with open_system("trinamo", trinamo=("plain",)) as system:
        asker = Asker(system)
        for form in PATHS:
            asker.measure(form, requests, options.tokens)
        for number in range(pairs):
            forms = list(PATHS) if number % 2 else list(PATHS)[::-1]
            for form in forms:
                found[form].append(asker.measure(form, requests, options.tokens))
    print(
        "| form | first event µs | to chat | first token µs | to chat | frontend CPU µs | to chat |"
    )
    print("|---|---|---|---|---|---|---|")
    for form, told in found.items():
        cells = []
        for name in ("event_us", "token_us", "cpu_us"):
            ratios = [
                mine[name] / chat[name] for mine, chat in zip(told, found["chat"], strict=True)
            ]
            cells += [f"{median(each[name] for each in told):,.0f}", f"{median(ratios):.2f}"]
        print(f"| {form} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
