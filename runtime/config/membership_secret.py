"""The secret that the processes of one cluster share, read from its file at the start.

Every TCP port of ours asks for proof of it before anything else (`protocol/streams/membership.py`).
Without one, ports are bound on loopback only (`transports/tcp/sockets.py`).
"""

from __future__ import annotations

import os
import stat
from typing import Final

from ..errors import ConfigError
from .config import SecurityConfig

SECRET_BYTES_MIN: Final = 16
SECRET_BYTES_MAX: Final = 4096
_KEY: Final = "security.secret_file"


def read_secret(section: SecurityConfig) -> bytes:
    """The cluster's secret, or nothing if none is configured; blocks on the disk, so call it early.

    A line end at the end of the file is not part of it: an editor that adds one must not shut a
    machine out. Raises `ConfigError` for a file that cannot be read, that every user of the machine
    can read, or that holds too little or too much.
    """
    path = section.secret_file
    if path is None:
        return b""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 -- its mode is asked of the same open file
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{_KEY}: {path} is not a plain file")
            if mode & stat.S_IROTH:
                raise ConfigError(
                    f"{_KEY}: every user of this machine can read {path}; run chmod o-r on it"
                )
            secret = file.read(SECRET_BYTES_MAX + 1).rstrip(b"\r\n")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{_KEY}: cannot read {path!r}: {why}") from error
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise ConfigError(
            f"{_KEY}: {path} holds {len(secret)} bytes; {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} are "
            "taken. `openssl rand -hex 32` makes a good one"
        )
    return secret
