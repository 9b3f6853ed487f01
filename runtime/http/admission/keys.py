"""Who may ask: the keys of clients, read from a file or from the environment.

What is compared are keyed digests, whose key is made anew in each process: how long a comparison
takes tells nothing about a key. Keys stay out of logs; the names that the file gives them do not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import stat
from hashlib import blake2b
from pathlib import Path
from typing import Final

import attrs
import trio

from ...config.http import HttpConfig
from ...config.keys import is_loopback, look_at
from ...errors import ConfigError
from ...metrics.metrics import Metrics
from ..exchanges import Headers, find_header
from ..status import ForbiddenError, UnauthorizedError

LOOK_INTERVAL_S: Final = 5.0
FILE_BYTES_MAX: Final = 1 << 20
KEYS_MAX: Final = 1024
KEY_CHARACTERS_MIN: Final = 8
_LINE: Final = re.compile(
    r"(?:([A-Za-z0-9][A-Za-z0-9._-]{0,62})(\s+\(operator\))?:\s*)?([!-~]{1,512})"
)
_BEARER: Final = b"bearer "
_ENVIRONMENT: Final = "env"

log = logging.getLogger("trinamo.http")


@attrs.frozen
class Key:
    """One key, without the key."""

    name: str
    """Its own, for logs and figures; keys of one name are one tenant's."""
    tenant: str
    """Whose requests these are, for those who answer them: opaque, and the same at each frontend."""
    is_operator: bool
    """Whether its holder may see what concerns all: figures, workers, traces."""


class ApiKeys:
    """The keys of `http.api_keys_file` and `http.api_key_env`; there must be one of both.

    Raises `ConfigError`, with a sentence that says what to do, if they cannot be used.
    """

    def __init__(self, section: HttpConfig, rng: random.Random, metrics: Metrics) -> None:
        self._section = section
        self._salt = rng.getrandbits(256).to_bytes(32, "big")
        self._requests = metrics.counts("key_requests", "Requests by the name of their key", "key")
        self._seen = look_at(section.api_keys_file)
        self._keys = self._read()
        """By digest."""
        if not self._keys:
            raise ConfigError(f"http.api_keys_file: {section.api_keys_file} holds no key")

    def check(self, headers: Headers) -> Key:
        """The key in `headers`; raises `UnauthorizedError` if there is none of ours."""
        given = find_header(headers, b"authorization") or b""
        # As Anthropic's clients send it.
        text = find_header(headers, b"x-api-key") or b""
        if given[:7].lower() == _BEARER:
            text = given[7:]
        if not text:
            raise UnauthorizedError("a key is needed: send it as `Authorization: Bearer …`")
        key = self._keys.get(self._digest(text.strip()))
        if key is None:
            raise UnauthorizedError("the key is none of this server's")
        self._requests.tally(key.name).value += 1
        return key

    def check_operator(self, headers: Headers) -> None:
        """Raise `UnauthorizedError`, or `ForbiddenError` for a key of ours that is no operator's."""
        if not self.check(headers).is_operator:
            raise ForbiddenError("this needs the key of an operator")

    async def follow(self) -> None:
        """Tell what is unwise about the keys; then, until cancelled, read the file when it changes."""
        for fault in self.find_faults():
            log.warning(fault)
        while True:
            await trio.sleep(LOOK_INTERVAL_S)
            self.renew()

    def renew(self) -> None:
        """Read the file again if it has changed.

        One that is gone, or has a line that is none, may be half written: it is told in the log,
        and the keys stay as they were. One without a line lets nobody in any more. Reads the disk.
        """
        seen = look_at(self._section.api_keys_file)
        if seen == self._seen:
            return
        self._seen = seen
        before = {key.name for key in self._keys.values()}
        try:
            self._keys = self._read()
        except ConfigError as error:
            text = "the keys were not read again, the old ones stay: %s"
            log.error(text, error.message)  # noqa: TRY400 -- the sentence says it all
            return
        for name in before.difference(key.name for key in self._keys.values()):
            self._requests.remove("key", name)
        if not self._keys:
            log.error("the keys were read again, and there are none: nobody is let in")
        else:
            log.info("the keys were read again: there are %d", len(self._keys))

    def find_faults(self) -> list[str]:
        """What is allowed but not wise; empty if there is nothing."""
        found, section = [], self._section
        if section.tls.certificate_file is None and not is_loopback(section.host):
            found.append(
                "clients' keys travel in clear text: whoever is between can read them; set http.tls,"
                " or let a proxy that speaks TLS stand before this server"
            )
        file, mode = section.api_keys_file, 0
        if file is not None:
            with contextlib.suppress(OSError):
                status = Path(file).stat()
                # But for a group that lets this process read it.
                own = stat.S_IRWXG if status.st_uid == os.geteuid() else 0
                mode = status.st_mode & (stat.S_IRWXO | own)
        if mode:
            found.append(f"http.api_keys_file: others may read {file}; chmod 600 it")
        return found

    def _digest(self, key: bytes) -> bytes:
        return blake2b(key, key=self._salt, digest_size=32).digest()

    def _read(self) -> dict[bytes, Key]:
        found: dict[bytes, Key] = {}
        section = self._section
        if section.api_key_env is not None:
            key = os.environ.get(section.api_key_env)
            if key is None:
                raise ConfigError(
                    f"http.api_key_env: there is no environment variable {section.api_key_env}"
                )
            self._add(found, f"http.api_key_env: {section.api_key_env}", key.strip(), _ENVIRONMENT)
        if section.api_keys_file is not None:
            where = f"http.api_keys_file: {section.api_keys_file}"
            try:
                with Path(section.api_keys_file).open("rb") as stream:
                    data = stream.read(FILE_BYTES_MAX + 1)
            except OSError as error:
                raise ConfigError(f"{where}: {error.strerror}") from None
            if len(data) > FILE_BYTES_MAX:
                raise ConfigError(f"{where} is longer than {FILE_BYTES_MAX} bytes")
            lines = data.decode("utf-8", "replace").splitlines()
            for number, line in enumerate(map(str.strip, lines), 1):
                if line and not line.startswith("#"):
                    self._add(found, f"{where}, line {number}", line, f"line{number}")
            if len(found) > KEYS_MAX:
                raise ConfigError(f"{where} holds more than {KEYS_MAX} keys")
        return found

    def _add(self, found: dict[bytes, Key], where: str, text: str, place: str) -> None:
        parts = _LINE.fullmatch(text)
        if parts is None or len(parts[3]) < KEY_CHARACTERS_MIN:
            raise ConfigError(
                f"{where}: a key has {KEY_CHARACTERS_MIN} to 512 visible characters, and may have a"
                " name before it, as in `alice: KEY` or `alice (operator): KEY`"
            )
        key = parts[3].encode()
        digest = self._digest(key)
        if digest in found:
            raise ConfigError(f"{where}: the key is there twice")
        # Who sets a variable of the process is an operator.
        is_operator = parts[2] is not None or place == _ENVIRONMENT
        # A name, if it has one, tells it from others; `place` is where it was read.
        owner = b"key " + key if parts[1] is None else b"name " + parts[1].encode()
        tenant = blake2b(owner, digest_size=8, person=b"trinamo-tenant").hexdigest()
        found[digest] = Key(parts[1] or place, tenant, is_operator)
