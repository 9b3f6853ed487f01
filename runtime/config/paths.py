"""Where the files of this user are. What is read from them is the business of who asks."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """This user's folder for what can be made again: `$XDG_CACHE_HOME/trinamo`, else `~/.cache/trinamo`."""
    return at_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "trinamo"


def at_home(path: str | Path) -> Path:
    """The path, with what `~` stands for.

    A user of a container may be in no list of users: his home is `/`, as containers have it.
    """
    found = os.path.expanduser(path)  # noqa: PTH111 -- pathlib's raises where there is no such home
    return Path("/", found.removeprefix("~/")) if found.startswith("~/") else Path(found)
