"""A transport of your own: a control plane in a file, for the processes of one machine.

    python examples/sqlite_transport.py

An installed package offers it as `trinamo.transports` = {sqlite: sqlite_transport}; then a process that
is told `control_plane.backend: sqlite` and `control_plane.options: {path: …}` needs no etcd. It blocks for
the microseconds that SQLite takes, and looks for changes every 20 ms. See docs/write_a_transport.md.
"""

import math
import sqlite3
from collections import deque
from contextlib import asynccontextmanager, contextmanager

import trio

from trinamo import ControlPlaneError, LeaseLostError, RealEnv
from trinamo.planes import Delete, Entry, Lease, Put, PutOutcome, Resync, Snapshot

VALUE_BYTES_MAX, HISTORY_MAX, LOOK_S = 1 << 20, 10_000, 0.02
TABLES = """
    PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF;
    CREATE TABLE IF NOT EXISTS changes (key, value, revision, created, lease);
    CREATE INDEX IF NOT EXISTS by_key ON changes (key, revision);
    CREATE INDEX IF NOT EXISTS by_revision ON changes (revision);
    CREATE TABLE IF NOT EXISTS leases (id INTEGER PRIMARY KEY AUTOINCREMENT, ttl, ends);
"""  # A change without a value is a delete; the last change of a key is what it is.
NOW = "SELECT key, value, max(revision), created, lease FROM changes WHERE {} GROUP BY key HAVING value NOT NULL"
UNDER = "instr(key, ?) = 1"


@asynccontextmanager
async def open_control(options, env):
    plane = SqliteControlPlane(options["path"], env.clock)
    try:
        yield plane
    finally:
        plane.db.close()


class SqliteControlPlane:
    def __init__(self, path, clock):
        self.path, self.clock = path, clock
        self.db = sqlite3.connect(path, isolation_level=None)
        self.db.executescript(TABLES)

    @contextmanager
    def transaction(self):
        """Alone with the store, without the keys of leases that are over; it yields the revision."""
        self.db.execute("BEGIN IMMEDIATE")
        with self.db:
            over = "SELECT id FROM leases WHERE ends <= ? ORDER BY ends"
            for (lease_id,) in self.rows(over, self.clock.wall()):
                self.end_lease(lease_id)
            yield self.revision()

    def rows(self, statement, *values):
        return self.db.execute(statement, values).fetchall()

    def revision(self):
        return self.rows("SELECT max(revision) FROM changes")[0][0] or 0

    def entries(self, which, value):
        return [Entry(*row) for row in self.rows(NOW.format(which), value)]

    def remove(self, entries):
        revision = self.revision() + 1
        for entry in entries:
            self.rows("INSERT INTO changes VALUES (?, NULL, ?, 0, 0)", entry.key, revision)
        return len(entries)

    def end_lease(self, lease_id):
        if self.rows("DELETE FROM leases WHERE id = ? RETURNING id", lease_id):
            held = self.entries(UNDER, "")
            self.remove([entry for entry in held if entry.lease_id == lease_id])

    def write(self, key, value, guard, lease_id):
        if not key or len(value) > VALUE_BYTES_MAX:
            raise ControlPlaneError("an empty key, or too large a value", definite=True)
        with self.transaction() as before:
            held = next(iter(self.entries("key = ?", key)), None)
            if guard not in (None, held.mod_revision if held else 0):
                return PutOutcome(succeeded=False, revision=before)
            if lease_id and not self.rows("SELECT 1 FROM leases WHERE id = ?", lease_id):
                raise LeaseLostError(f"there is no lease {lease_id}")
            revision = before + 1
            row = (key, value, revision, held.create_revision if held else revision, lease_id)
            self.rows("INSERT INTO changes VALUES (?, ?, ?, ?, ?)", *row)
            old = "DELETE FROM changes WHERE key = ? AND revision < min(?, ?)"
            self.rows(old, key, revision, revision - HISTORY_MAX)
        return PutOutcome(succeeded=True, revision=revision)

    async def get(self, key):
        await trio.lowlevel.checkpoint()
        with self.transaction():
            return next(iter(self.entries("key = ?", key)), None)

    async def range(self, prefix):
        await trio.lowlevel.checkpoint()
        with self.transaction() as revision:
            return Snapshot(revision, self.entries(UNDER, prefix))

    async def put(self, key, value, *, lease_id=0):
        await trio.lowlevel.checkpoint()
        return self.write(key, value, None, lease_id).revision

    async def compare_and_put(self, key, value, *, mod_revision, lease_id=0):
        await trio.lowlevel.checkpoint()
        return self.write(key, value, mod_revision, lease_id)

    async def delete(self, key):
        await trio.lowlevel.checkpoint()
        with self.transaction():
            return self.remove(self.entries("key = ?", key)) == 1

    async def delete_prefix(self, prefix):
        await trio.lowlevel.checkpoint()
        with self.transaction():
            return self.remove(self.entries(UNDER, prefix))

    async def grant_lease(self, ttl_s):
        await trio.lowlevel.checkpoint()
        if not 0 < ttl_s < math.inf:
            raise ControlPlaneError(f"a lease of {ttl_s} s is impossible", definite=True)
        granted = "INSERT INTO leases (ttl, ends) VALUES (?, ?) RETURNING id"
        with self.transaction():
            return Lease(self.rows(granted, ttl_s, self.clock.wall() + ttl_s)[0][0], ttl_s)

    async def keep_alive(self, lease_id):
        await trio.lowlevel.checkpoint()
        renewed = "UPDATE leases SET ends = ? + ttl WHERE id = ? RETURNING ttl"
        with self.transaction():
            for (ttl_s,) in self.rows(renewed, self.clock.wall(), lease_id):
                return ttl_s
        raise LeaseLostError(f"there is no lease {lease_id}")

    async def revoke_lease(self, lease_id):
        await trio.lowlevel.checkpoint()
        with self.transaction():
            self.end_lease(lease_id)

    @asynccontextmanager
    async def watch(self, prefix):
        yield Watch(self, prefix)

    async def check_health(self):
        await trio.lowlevel.checkpoint()
        return f"SQLite {sqlite3.sqlite_version}, {self.path}"


class Watch:
    """Events wait in `self.events`, so that a receive that is cancelled loses none."""

    def __init__(self, plane, prefix):
        self.plane, self.prefix, self.seen, self.events = plane, prefix, None, deque()

    def __aiter__(self):
        return self

    async def __anext__(self):
        await trio.lowlevel.checkpoint()
        while not self.events:
            self.look()
            if not self.events:
                await trio.sleep(LOOK_S)
        return self.events.popleft()

    def look(self):
        with self.plane.transaction() as revision:
            seen, self.seen = self.seen, revision
            if seen is None or seen < revision - HISTORY_MAX:
                kind = Snapshot if seen is None else Resync
                self.events.append(kind(revision, self.plane.entries(UNDER, self.prefix)))
                return
            changed = f"SELECT * FROM changes WHERE {UNDER} AND revision > ? ORDER BY rowid"
            for row in self.plane.rows(changed, self.prefix, seen):
                entry = Entry(*row)
                is_put = entry.value is not None
                self.events.append(Put(entry) if is_put else Delete(entry.key, entry.mod_revision))


async def main():
    async with open_control({"path": ":memory:"}, RealEnv()) as plane, plane.watch("a/") as events:
        await plane.put("a/key", b"value")
        print(await plane.check_health())
        print(await anext(events))


if __name__ == "__main__":
    trio.run(main)
