"""Trees of other builds: earlier ones out of the history, and this one with a minor more.

What the newer one adds, a frame, a field of a request, of an event and of a job, a field and a key of the store,
this one skips.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Final

from tests.needs import HISTORY
from trinamo.runtime.protocol.versions import SPOKEN

ROOT: Final = Path(__file__).parents[3]
UNVERSIONED: Final = "65a48f1"
"""The last release that told no version."""
FIRST: Final = "6a9b7103"
"""The first build of which all spoke this major as it is: told, signed and sealed."""
NEWER: Final = f"{SPOKEN[-1].major}.{SPOKEN[-1].minor + 1}"


def earlier_build(place: Path, revision: str) -> Path:
    """What was importable of `revision`, out of the history."""
    git = shutil.which("git")
    if git is None:
        HISTORY.lacking()
    packed = subprocess.run([git, "archive", revision], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        HISTORY.lacking()
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(place, filter="tar")
    return place / "src"


def newer_build(place: Path) -> Path:
    """This tree with one minor more, and something new in each place where a minor may add."""
    for each in ("src", "runtime", "transports", "sim"):
        shutil.copytree(ROOT / each, place / each, symlinks=True)
    for path, before, after in ADDED:
        file = place / path
        text = file.read_text("utf-8")
        assert text.count(before) == 1, path
        file.write_text(text.replace(before, after), "utf-8")
    return place / "src"


# fmt: off
ADDED: Final = (
    ("runtime/protocol/versions.py",
     f"SPOKEN: Final = (Version{tuple(SPOKEN[-1])},)",
     f"SPOKEN: Final = (Version{NEWER.replace('.', ', ').join('()')},)"),
    # A field of every entry.
    ("runtime/protocol/versions.py",
     'return msgspec.json.encode(entry)[:-1] + b"," + _OURS[1:]',
     """return msgspec.json.encode(entry)[:-1] + b',"new":{"a":[1]},' + _OURS[1:]"""),
    # A field of every request, and one of where its answer goes.
    ("runtime/protocol/streams/request.py",
     "encode_envelope: Final = msgspec.json.Encoder().encode",
     """def encode_envelope(said: object) -> bytes:
    text = msgspec.json.encode(said).replace(b'"address":', b'"new":{"a":[1]},"address":')
    return b'{"new":{"a":[1]},' + text[1:] if text.startswith(b'{"') else text"""),
    # A frame on every stream, with what opens it.
    ("runtime/protocol/streams/link_frames.py",
     "    return _OPENING.pack(*head) + subject",
     "    return _OPENING.pack(*head) + subject + _frame(stream, 200, b'new')"),
    # A key of the store, beside that of every instance.
    ("runtime/process/entries.py",
     "        await self._put(instance.key, partial(_render, instance))\n        self._inst",
     "        await self._put(f'new/{instance.id}', lambda _: b'{}')\n        await self._put(instance.key, partial(_render, instance))\n        self._inst"),
    # A field of every message about a prompt that is computed elsewhere, and of its job.
    *(
        ("runtime/protocol/disaggregation/messages.py",
         f"class {name}(msgspec.Struct, frozen=True, kw_only=True{more}):\n",
         f"class {name}(msgspec.Struct, frozen=True, kw_only=True{more}):\n    new: tuple[int, ...] = (1,)\n")
        for name, more in (("RemotePrefillRequest", ""), ("Claim", ""), ("Lent", ""),
                           ("PrefillDone", ""), ("PrefillAsk", ""), ("Kept", ", tag=True"))
    ),
    # A field of every event, of KV blocks and of load.
    ("runtime/protocol/events/sequence.py",
     "    sequence: int\n    body: bytes | None\n",
     "    sequence: int\n    body: bytes | None\n    new: tuple[int, ...] = (1,)\n"),
)
# fmt: on
