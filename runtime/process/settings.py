"""Settings that may change while the cluster runs: typed keys under `config/` in the control plane.

Every process runs one `Settings` (`Runtime.settings`), which follows the prefix. A value that does
not decode, or is out of bounds, is refused with a log line and counted, and the one before it stays
in force; a key that is deleted falls back to its default. While the store is away the last known
values hold.

A setting that is called after a configuration key replaces that key in every process while it is
set (`LiveConfig`). Whatever it changes is changed in one step of the loop: requests under way go on
as they began. What never changes in a running process is in `config.py`. The commands `trinamo
config get|set|watch` are in `src/trinamo/cli/settings.py`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Annotated, Any, Final, Generic, Literal, Optional, TypeVar

import attrs
import msgspec
import trio
from msgspec import Meta

from ..config.config import Config
from ..config.keys import config_fields, words_of
from ..config.source import nearest
from ..errors import RequestError
from ..metrics.metrics import Metrics
from ..planes import ControlPlane, Delete, Entry, Put, Resync, Snapshot, WatchEvent
from ..planes.retries import Retries
from ..protocol.undecodable import UNDECODABLE, Unsigned, decoding_fault
from ..sinks import Changes

_log = logging.getLogger("trinamo.settings")

SETTINGS_PREFIX: Final = "config/"
VALUE_BYTES_MAX: Final = 4096
T = TypeVar("T")


@attrs.frozen(eq=False)
class Setting(Generic[T]):
    """One key: its name, the type and bounds of its value, and what holds without it."""

    name: str
    type: Any
    """What msgspec decodes the value to, such as `Annotated[int, Meta(ge=0)]`."""
    default: T
    about: str

    @property
    def key(self) -> str:
        """Where it is in the control plane."""
        return SETTINGS_PREFIX + self.name

    def decode(self, value: bytes) -> T:
        """The value in the JSON text `value`; `RequestError` if it is none of this setting's."""
        if len(value) > VALUE_BYTES_MAX:
            raise RequestError(f"{self.name}: {len(value)} bytes; {VALUE_BYTES_MAX} fit")
        if isinstance(value, Unsigned):
            raise RequestError(
                f"{self.name}: {value.fault}; set it again with `trinamo config set`"
            )
        try:
            found: T = msgspec.json.decode(value, type=self.type)
        except UNDECODABLE as error:
            raise RequestError(f"{self.name}: {decoding_fault(error)}", param=self.name) from error
        return found

    def read(self, text: str) -> T:
        """The value that a person wrote: JSON, or plain text for a string; raises as `decode`."""
        try:
            return self.decode(text.encode())
        except RequestError as error:
            try:
                return self.decode(msgspec.json.encode(text))
            except RequestError as other:
                # Who wrote a word that is not one of those it takes is told those.
                told = f"; it takes {', '.join(self.choices)}" if self.choices else ""
                is_json = isinstance(error.__cause__, msgspec.ValidationError)
                raise RequestError(
                    f"{(error if is_json and not told else other).message}{told}"
                ) from None

    @property
    def choices(self) -> Sequence[str]:
        """The texts that it takes, where it takes only some."""
        return list(words_of(self.type))

    def encode(self, value: T) -> bytes:
        """The JSON text of `value`."""
        return msgspec.json.encode(value)


REQUESTS_MAX: Final[Setting[int]] = Setting(
    "worker.requests_max",
    Annotated[int, Meta(ge=0, le=1_000_000)],
    0,
    "Requests at once in each worker; one more is refused. 0: as each is configured.",
)

PREFILL_TOKENS_LOCAL_MAX: Final[Setting[int]] = Setting(
    "disaggregation.prefill_tokens_local_max",
    Annotated[int, Meta(ge=-1, le=1 << 20)],
    -1,
    "Prompts with no more to compute stay at the decode worker. -1: as each is configured.",
)
QUEUE_DEPTH_MAX: Final[Setting[int]] = Setting(
    "disaggregation.queue_depth_max",
    Annotated[int, Meta(ge=-1, le=10_000)],
    -1,
    "While so many prompts wait for prefill workers none goes there. -1: as each is configured.",
)

_LivePolicy = Literal["round_robin", "random", "least_loaded", "power_of_two"]
"""Those that need nothing that a running router may lack: `kv` keeps account of blocks from the start."""
_ABOUT_POLICY: Final = (
    "How an instance is chosen; `power_of_two` draws two and takes the less loaded. `kv` and `direct`"
    " are for the configuration alone."
)


def _of_key(key: str, kind: Any = None, about: str = "") -> Setting[Any]:
    field = config_fields(Config)[key]
    # What is said of a file is not all true here: `null` means another thing, and workers are told.
    text = about or field.text
    text = re.sub(r" null: [^.]*\.", "", text).replace(" Workers must be told it, too.", "")
    about = f"{text} null: as each is configured."
    return Setting(key, Optional[kind or field.type], None, about)  # noqa: UP045 -- of a value


LIVE_KEYS: Final[Sequence[Setting[Any]]] = (
    _of_key("router.policy", _LivePolicy, _ABOUT_POLICY),
    *map(
        _of_key,
        (
            *("router.inhibit_s", "router.attempts_max"),
            *("router.migrations_max", "router.migration_tokens_max"),
            *("router.kv.overlap_credit", "router.kv.overlap_credit_decay"),
            *("router.kv.prefill_load_scale", "router.kv.active_request_weight"),
            *("router.kv.temperature", "http.requests_max"),
            *("http.busy_blocks", "http.busy_waiting_tokens"),
            *("http.queue_max", "http.queue_timeout_s"),
            *("http.rate_per_s", "http.rate_burst"),
            *("log.level", "log.access"),
        ),
    ),
)
"""Settings that take the place of the configuration key of their name (`LiveConfig`)."""
SETTINGS: Final[Mapping[str, Setting[Any]]] = {
    each.name: each
    for each in (REQUESTS_MAX, PREFILL_TOKENS_LOCAL_MAX, QUEUE_DEPTH_MAX, *LIVE_KEYS)
}


def find_setting(name: str) -> Setting[Any]:
    """The setting called `name`; `RequestError` names those there are."""
    try:
        return SETTINGS[name]
    except KeyError:
        known = ", ".join(SETTINGS)
        if name in config_fields(Config):
            raise RequestError(
                f"{name} is read once, at the start of each process: change it in the"
                f" configuration and restart them. These change while they run: {known}"
            ) from None
        hint = nearest(name, SETTINGS) or f"; there are: {known}"
        raise RequestError(f"there is no setting {name!r}{hint}") from None


class Settings:
    """The values in force, followed by `run`. Before it has started, the defaults."""

    def __init__(self, control: ControlPlane, *, metrics: Metrics) -> None:
        self._control = control
        self._by_key = {setting.key: setting for setting in SETTINGS.values()}
        self._values: dict[str, Any] = {}
        self._changed = Changes()
        self._loaded = trio.Event()
        self._refused = metrics.counts(
            "settings_refused", "Values in the control plane that were refused", "setting"
        )
        self._listeners: list[Callable[[], None]] = []

    def get(self, setting: Setting[T]) -> T:
        """The value in force now."""
        value: T = self._values.get(setting.key, setting.default)
        return value

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener`, which must not wait, after each change."""
        self._listeners.append(listener)

    async def wait_change(self, setting: Setting[T], known: T) -> T:
        """Return the value once it differs from `known`. Safe to cancel."""
        await trio.lowlevel.checkpoint()
        while (value := self.get(setting)) == known:
            await self._changed.wait()
        return value

    async def run(self, begun: Callable[[], None] = lambda: None) -> None:
        """Follow the control plane until cancelled; `begun` is called after each event.

        An outage only makes it wait. Raises what is beyond repair, such as a store that does not
        let this user read the prefix.
        """
        async with self._control.watch(SETTINGS_PREFIX) as events:
            async for event in events:
                self.apply(event)
                begun()

    async def follow(self) -> None:
        """`run` for a process that lives without: what is beyond repair is logged, tried again.

        Meanwhile the last known values hold, or the defaults.
        """
        await Retries(_log, "settings are not followed").run(self.run)

    async def wait_loaded(self) -> None:
        """Return once what is stored has been read; safe to cancel, for a store may be away."""
        await self._loaded.wait()

    def apply(self, event: WatchEvent) -> None:
        """Take one watch event; synchronous."""
        match event:
            case Snapshot(_, entries) | Resync(_, entries):
                present = {entry.key for entry in entries}
                for key in [key for key in self._values if key not in present]:
                    self._delete(key)
                for entry in entries:
                    self._put(entry)
            case Put(entry):
                self._put(entry)
            case Delete(key, _):
                self._delete(key)
        for listener in self._listeners:
            listener()
        self._loaded.set()
        self._changed.notify()

    def _put(self, entry: Entry) -> None:
        setting = self._by_key.get(entry.key)
        if setting is None:
            # A stranger's key must not become a time series of its own.
            self._refuse("unknown", f"{entry.key[:160]!r} is no setting of this version")
            return
        try:
            value = setting.decode(entry.value)
        except RequestError as error:
            kept = self.get(setting)
            self._refuse(setting.name, f"{error.message}; {kept!r} stays in force")
            return
        if value != self.get(setting):
            _log.info("setting %s is %r now", setting.name, value)
        self._values[entry.key] = value

    def _delete(self, key: str) -> None:
        if self._values.pop(key, None) is not None:
            setting = self._by_key[key]
            _log.info("setting %s is as each process is configured again", setting.name)

    def _refuse(self, name: str, why: str) -> None:
        _log.warning("setting refused: %s", why)
        self._refused.tally(name).value += 1


class LiveConfig:
    """A process's own configuration, with what the cluster's settings say in its place.

    Tells those who listen, synchronously, whenever it changes.
    """

    def __init__(self, config: Config, settings: Settings, *, metrics: Metrics) -> None:
        self._own, self._settings = config, settings
        self._listeners: list[Callable[[Config], None]] = []
        self._shown = metrics.counts(
            "setting_value",
            "The value in force, of settings that are numbers",
            "setting",
            may_fall=True,
        )
        self.config = config
        """What is in force now."""
        settings.listen(self._update)
        self._show()

    def listen(self, listener: Callable[[Config], None]) -> None:
        """Call `listener` with what is in force after each change, and now if it differs already."""
        self._listeners.append(listener)
        if self.config is not self._own:
            listener(self.config)

    def values(self) -> dict[str, Any]:
        """What is in force of each setting, by its name."""
        stored = {each.name: self._settings.get(each) for each in SETTINGS.values()}
        return {
            name: reduce(getattr, name.split("."), self.config)
            if stored[name] == each.default
            else stored[name]
            for name, each in SETTINGS.items()
        }

    def _update(self) -> None:
        found = self._own
        for setting in LIVE_KEYS:
            value = self._settings.get(setting)
            if value is not None:
                found = _replaced(found, setting.name.split("."), value)
        changed, self.config = found != self.config, found
        self._show()
        for listener in self._listeners if changed else ():
            listener(found)

    def _show(self) -> None:
        for name, value in self.values().items():
            if isinstance(value, (int, float)):
                self._shown.tally(name).value = value
            else:
                self._shown.drop(name)


def _replaced(section: Any, way: list[str], value: Any) -> Any:
    """The section with `value` at the end of the `way`."""
    name, *more = way
    inner = _replaced(getattr(section, name), more, value) if more else value
    return msgspec.structs.replace(section, **{name: inner})


@attrs.frozen
class SettingReading:
    """What the control plane says of one setting."""

    setting: Setting[Any]
    value: Any
    is_default: bool
    problem: str = ""
    """Why the stored value is refused by everyone; empty if it is not."""


async def read_settings(control: ControlPlane) -> list[SettingReading]:
    """All settings as stored, in the order they are declared."""
    snapshot = await control.range(SETTINGS_PREFIX)
    stored = {entry.key: entry.value for entry in snapshot.entries}
    found = []
    for setting in SETTINGS.values():
        value, is_default, problem = setting.default, True, ""
        if setting.key in stored:
            try:
                value, is_default = setting.decode(stored[setting.key]), False
            except RequestError as error:
                problem = error.message
        found.append(SettingReading(setting, value, is_default, problem))
    return found


async def write_setting(control: ControlPlane, name: str, text: str) -> Any:
    """Check and store a value as `Setting.read` takes it, and return it; `RequestError` stores nothing."""
    setting = find_setting(name)
    value = setting.read(text)
    await control.put(setting.key, setting.encode(value))
    return value


async def reset_setting(control: ControlPlane, name: str) -> Any:
    """Delete the stored value and return the default, by which each process is as it is configured."""
    setting = find_setting(name)
    await control.delete(setting.key)
    return setting.default
