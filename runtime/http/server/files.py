"""Whether a file was written or replaced since it was read, whatever links lead to it."""

from __future__ import annotations

from pathlib import Path


def look_at(*names: str | None) -> tuple[object, ...]:
    """What is another once one of these files is."""
    seen: list[object] = []
    for name in names:
        try:
            found = Path(name).stat() if name is not None else None
        except OSError as error:
            seen.append(error.errno)
        else:
            seen.append(found and (found.st_ino, found.st_mtime_ns, found.st_ctime_ns))
    return tuple(seen)
