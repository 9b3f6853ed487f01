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
from typing import Any, Final

import msgspec

from ....errors import ConfigError, EngineError, RequestError
from ....protocol.openai.generate import ChatMessage
from .sandbox import CPU_S, LENGTH_BYTES, MEMORY_BYTES

_Work = Callable[..., Any]
_Answer = tuple[str, Any, str]
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

    def render(messages: list[Any] | None = None, tools: str = "") -> str:
        if messages is None:
            return ""  # Only whether there is a template is asked.
        return template.render(msgspec.convert(messages, list[ChatMessage]), tools)

    return render


def main(kind: str, channel: socket.socket) -> None:
    """Answer until the other end closes, or a bound is reached."""
    # Ctrl-C at a terminal goes to the whole group; we end with our parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    is_forked = kind == "grammar"
    setup = msgspec.msgpack.decode(_read(channel))
    signal.setitimer(signal.ITIMER_PROF, _SETUP_CPU_S)
    _bound_memory()
    work = _work(_make_grammars if is_forked else _make_templates, setup)
    signal.setitimer(signal.ITIMER_PROF, 0)
    _bound_memory()
    while True:
        number, arguments = msgspec.msgpack.decode(_read(channel))
        if not is_forked:
            _write(channel, number, _bounded(work, arguments))
        elif (pid := os.fork()) == 0:
            _write(channel, number, _bounded(work, arguments))
            os._exit(0)
        elif os.waitpid(pid, 0)[1]:
            _write(channel, number, ("exceeded", None, ""))


def _work(make: Callable[..., _Work], setup: list[Any]) -> _Work:
    try:
        return make(*setup)
    except Exception as error:  # noqa: BLE001 -- told with every call
        told = getattr(error, "message", "") or f"{type(error).__name__}: {error}"

    def fail(*_: Any) -> None:
        raise ConfigError(told)

    return fail


def _bound_memory() -> None:
    with open("/proc/self/statm") as file:  # noqa: PTH123 -- imports little
        pages = int(file.read().split()[0])
    bound = pages * resource.getpagesize() + MEMORY_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))


def _bounded(work: _Work, arguments: list[Any]) -> _Answer:
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        return "returned", work(*arguments), ""
    except MemoryError:
        return "exceeded", None, ""
    except RequestError as error:
        return "request", error.message, error.param or ""
    except ConfigError as error:
        return "config", error.message, ""
    except EngineError as error:
        if isinstance(error.__cause__, MemoryError):
            return "exceeded", None, ""
        return "engine", error.message, ""
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _read(channel: socket.socket) -> bytes:
    length = int.from_bytes(_read_exactly(channel, LENGTH_BYTES))
    return _read_exactly(channel, length)


def _read_exactly(channel: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = channel.recv(count - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return bytes(data)


def _write(channel: socket.socket, number: int, answer: _Answer) -> None:
    message = msgspec.msgpack.encode((number, *answer))
    channel.sendall(len(message).to_bytes(LENGTH_BYTES) + message)


if __name__ == "__main__":
    main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
