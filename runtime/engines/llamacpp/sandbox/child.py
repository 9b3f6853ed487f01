"""The child of `sandbox.py`: one function, called with what comes over a socket.

The kernel keeps its bounds: a timer of processor time, whose signal ends the process, and a limit of its
address space. A grammar is made in a fork, so that the vocabulary, which takes half a second, outlives a bad
one; a template is rendered in the child itself, as a fork takes longer than most templates.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import msgspec

from ....errors import ConfigError, ContextLengthError, EngineError, RequestError
from ....protocol.openai.generate import ChatMessage
from .sandbox import CPU_S, MEMORY_BYTES, Answer, receive, send

_Work = Callable[..., Any]
_SETUP_CPU_S: Final = 30.0


def _make_grammars(tokens: list[bytes], end_ids: list[int], special_ids: list[int]) -> _Work:
    from ..grammars import Compiler  # noqa: PLC0415 -- each needs another library

    # The model's own way to make tokens of text is not here, and what is found out is the same by bytes.
    byte_ids = {token: each for each, token in enumerate(tokens) if len(token) == 1}

    def encode(text: str) -> list[int]:
        return [byte_ids[bytes((each,))] for each in text.encode()]

    return Compiler(tokens, encode, end_ids=end_ids, special_ids=special_ids).examine


def _make_templates(source: str, chars_max: int, bos: str, eos: str, specials: list[str]) -> _Work:
    from ..chat_template import ChatTemplate  # noqa: PLC0415

    template = ChatTemplate(source, chars_max=chars_max, bos=bos, eos=eos, specials=specials)

    def render(messages: list[Any], *more: Any) -> str:
        text = template.render(msgspec.convert(messages, list[ChatMessage]), *more)
        # Half of a pair, out of escaped JSON, is no character, and nothing that could be sent.
        return text.encode("utf-8", "replace").decode()

    return render


def main(kind: str, channel: socket.socket) -> None:
    """Answer until the other end closes, or a bound is reached."""
    # Ctrl-C at a terminal goes to the whole group; we end with our parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    is_forked = kind == "grammar"
    made: list[_Work] = []

    def make(setup: list[Any]) -> None:
        made.append(_make_grammars(*setup) if is_forked else _make_templates(*setup))

    failure = _bounded(make, [receive(channel)], cpu_s=_SETUP_CPU_S)
    while True:
        arguments = receive(channel)
        if not made or not arguments:
            send(channel, failure)
        elif not is_forked:
            send(channel, _bounded(made[0], arguments))
        elif (pid := os.fork()) == 0:
            send(channel, _bounded(made[0], arguments))
            os._exit(0)
        elif os.waitpid(pid, 0)[1]:
            send(channel, ("exceeded", None, ""))


def _bounded(work: _Work, arguments: list[Any], cpu_s: float = CPU_S) -> Answer:
    with open("/proc/self/statm") as file:  # noqa: PTH123 -- imports little
        bytes_max = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (bytes_max, hard))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        return "returned", work(*arguments), ""
    except ContextLengthError as error:
        return "too_long", error.message, error.param or ""
    except RequestError as error:
        return "request", error.message, error.param or ""
    except ConfigError as error:
        return "config", error.message, ""
    except (EngineError, MemoryError) as error:
        is_memory = isinstance(error.__cause__ or error, MemoryError)
        return "exceeded" if is_memory else "engine", str(error), ""
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    with suppress(EOFError):
        main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
