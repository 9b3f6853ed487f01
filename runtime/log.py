"""The log: structlog on standard error, one event a line, with ids as fields and secrets masked.

`setup_log` is called once, by the front door; before that structlog's own defaults print. The rest
of the code asks `get_logger` for a logger and never formats text by hand: the event is a short
sentence, everything that varies is a field (`request_id=`, `instance_id=`). The libraries' stdlib
loggers end in the same stream. Logging is synchronous, so it belongs at edges, not in per-item
loops; `LogThrottle` is for what a peer can make happen often.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Final, TextIO, cast

import attrs
import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from .config import LogConfig, Secret
from .env import Clock

__all__ = ["LogThrottle", "Logger", "get_logger", "log_fields", "mask_secrets", "setup_log"]

Logger = FilteringBoundLogger

MASK: Final = "***"
# A field whose name has one of these as a word never shows its value ...
SECRET_WORDS: Final = frozenset(
    {"password", "passwd", "secret", "authorization", "credential", "credentials", "cookie"}
)
# ... nor one that ends so. `token` alone is not a word of theirs: most tokens here are text.
SECRET_ENDINGS: Final = ("auth_token", "access_token", "api_token", "api_key", "private_key")
# The user part of a URL, `nats://user:password@host`.
USER_PART: Final = re.compile(r"(?<=://)[^/@\s]+@")
# What nests deeper is written as its repr; bounds the work one event can cause.
DEPTH_MAX: Final = 4
# Libraries that say at `info` what we already say, or say it once per connection.
QUIET_LIBRARIES: Final = ("hypercorn", "nats", "grpc", "asyncio", "httpx", "httpcore", "trio")


def setup_log(config: LogConfig, *, stream: TextIO | None = None) -> None:
    """Send every log event of the process to `stream` (standard error unless given).

    `format: auto` writes for people on a terminal and one JSON object a line elsewhere; colour is
    used only on a terminal. May be called again, then the last call wins.
    """
    target = sys.stderr if stream is None else stream
    is_terminal = target.isatty()
    as_json = config.format == "json" or (config.format == "auto" and not is_terminal)
    level = logging.getLevelNamesMapping()[config.level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        mask_secrets,
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *_renderers(as_json=as_json, colors=is_terminal),
        ],
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    for old in list(root.handlers):
        if isinstance(old.formatter, structlog.stdlib.ProcessorFormatter):
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    for name in QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=False,
    )


def _renderers(*, as_json: bool, colors: bool) -> list[Processor]:
    if as_json:
        return [
            structlog.processors.format_exc_info,
            mask_secrets,  # Again: a traceback may quote a URL.
            structlog.processors.JSONRenderer(default=_json_fallback, ensure_ascii=False),
        ]
    plain = structlog.dev.plain_traceback
    return [
        structlog.dev.ConsoleRenderer(
            colors=colors, exception_formatter=plain, timestamp_key="time"
        )
    ]


def _json_fallback(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def get_logger(name: str) -> Logger:
    """The logger for a module; pass `__name__`. Cheap, and safe before `setup_log`."""
    return cast("Logger", structlog.stdlib.get_logger(name))


@contextmanager
def log_fields(**fields: Any) -> Iterator[None]:
    """Add fields such as `request_id` to every event in this scope and the tasks it starts."""
    with structlog.contextvars.bound_contextvars(**fields):
        yield


def mask_secrets(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replace the value of every field that is, or by its name holds, a secret."""
    return cast("EventDict", _masked(event, 0))


def _masked(value: Any, depth: int) -> Any:
    if isinstance(value, Secret):
        return MASK
    if isinstance(value, str):
        return USER_PART.sub(f"{MASK}@", value) if "://" in value else value
    if depth >= DEPTH_MAX:
        return value
    if isinstance(value, Mapping):
        return {
            key: MASK if _is_secret(key) and item is not None else _masked(item, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_masked(item, depth + 1) for item in value]
    return value


def _is_secret(name: object) -> bool:
    text = str(name).lower().replace("-", "_")
    return (
        text == "token"
        or text.endswith(SECRET_ENDINGS)
        or not SECRET_WORDS.isdisjoint(text.split("_"))
    )


@attrs.define
class _Slot:
    next_at: float
    suppressed: int = 0


class LogThrottle:
    """Lets one event per `key` through every `interval_s`, with the count of those held back.

    For what a peer can cause as often as it likes: bad frames, refused connections, drops. Keys
    are bounded by `keys_max`; the one used longest ago is forgotten first.
    """

    def __init__(
        self, logger: Logger, clock: Clock, *, interval_s: float = 5.0, keys_max: int = 256
    ) -> None:
        self._logger = logger
        self._clock = clock
        self._interval_s = interval_s
        self._keys_max = keys_max
        self._slots: OrderedDict[str, _Slot] = OrderedDict()

    def warning(self, event: str, /, *, key: str = "", **fields: Any) -> bool:
        """Log at warning; whether it was let through. `key` defaults to the event itself."""
        return self._log("warning", event, key, fields)

    def error(self, event: str, /, *, key: str = "", **fields: Any) -> bool:
        """Log at error; whether it was let through."""
        return self._log("error", event, key, fields)

    def info(self, event: str, /, *, key: str = "", **fields: Any) -> bool:
        """Log at info; whether it was let through."""
        return self._log("info", event, key, fields)

    def _log(self, method: str, event: str, key: str, fields: MutableMapping[str, Any]) -> bool:
        key = key or event
        now = self._clock.now()
        slot = self._slots.get(key)
        if slot is not None and now < slot.next_at:
            slot.suppressed += 1
            return False
        if slot is not None and slot.suppressed:
            fields["suppressed"] = slot.suppressed
        self._slots[key] = _Slot(now + self._interval_s)
        self._slots.move_to_end(key)
        if len(self._slots) > self._keys_max:
            self._slots.popitem(last=False)
        getattr(self._logger, method)(event, **fields)
        return True
