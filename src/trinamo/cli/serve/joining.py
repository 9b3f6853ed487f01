"""What makes a process one of a cluster: where the servers are, and what they and the peers ask for.

`trinamo up` hands it to its children by environment and writes it into its run file, where
`trinamo worker` and `trinamo frontend` beside it, `status`, `queue`, `config` and `doctor` find it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import SystemRandom
from typing import Any, Final

from trinamo.runtime.config.config import Config, SecurityConfig
from trinamo.runtime.config.keys import Secret, config_fields
from trinamo.transports.servers.scratch import scratch_directory

from ..options import as_text

_SECTIONS: Final = ("control_plane.", "event_plane.", "security.", "data_plane.requests")
# Where an embedded server keeps its data, and was told to listen, is its owner's business alone.
_OWN: Final = (".data_dir", ".store_dir", ".port")


def shared_settings(config: Config) -> dict[str, str]:
    """By key, as text, what differs from the defaults in all that the processes of a cluster share.

    Passwords and tokens are revealed: it goes into the run file, which is for its user alone.
    """
    found = {}
    for key, field in config_fields(Config).items():
        value = _lookup(config, key)
        is_shared = key.startswith(_SECTIONS) and not key.endswith(_OWN)
        if is_shared and value != field.default:
            found[key] = value.reveal() if isinstance(value, Secret) else as_text(value)
    return found


def _lookup(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


@contextmanager
def open_secret_file(section: SecurityConfig) -> Iterator[str]:
    """The secret of one cluster's TCP ports: as configured, else a new one that goes at the end."""
    if section.secret_file is not None:
        yield section.secret_file
        return
    with scratch_directory("trinamo-run-") as directory:
        path = directory / "secret"
        path.touch(mode=0o600)
        path.write_text(f"{SystemRandom().getrandbits(256):064x}\n", "ascii")
        yield str(path)
