"""The least that a process of each role needs of etcd and NATS, as commands and a user's permissions.

What members say there is signed or sealed whoever may write it (`docs/security.md`); these rights bound what one
who is in an attacker's hands can take away or overwrite. They are made of the prefixes and subjects of the code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from trinamo.runtime.caller.kv.agreement import ACTIVE_TOPIC
from trinamo.runtime.events.load import LOAD_TOPIC, STATUS_TOPIC
from trinamo.runtime.kv.events import KV_TOPIC
from trinamo.runtime.kv.transfer.metadata import NIXL_METADATA_KEY
from trinamo.runtime.process.settings import SETTINGS_PREFIX
from trinamo.runtime.protocol.discovery.instances import FRONTEND_PREFIX, INSTANCE_PREFIX
from trinamo.runtime.protocol.discovery.model_cards import MODEL_PREFIX
from trinamo.runtime.weights.messages import WEIGHTS_PREFIX
from trinamo.transports.assembly.data import REQUESTS_SUBJECT
from trinamo.transports.nats.queue.records import StreamNames
from trinamo.transports.nats.queue.streams import PROBE, PROBE_SUBJECT
from trinamo.transports.security.roles import Role, writers_of

_SERVING: Final = (Role.WORKER, Role.PREFILL)
_EVERYBODY_READS: Final = (INSTANCE_PREFIX, MODEL_PREFIX, FRONTEND_PREFIX, SETTINGS_PREFIX)
_INBOX: Final = "_INBOX.>"
_QUEUES: Final = (
    StreamNames("*").job_subject("*"),
    StreamNames("*").lease_subject("*"),
    StreamNames("*").dead_subject("*"),
    *(f"$JS.API.STREAM.{each}.*" for each in ("INFO", "CREATE", "UPDATE")),
    *(f"$JS.API.STREAM.MSG.{each}.*" for each in ("GET", "DELETE")),
    *(
        f"$JS.API.CONSUMER.{each}.*.{StreamNames.CONSUMER}"
        for each in ("DURABLE.CREATE", "INFO", "MSG.NEXT")
    ),
    "$JS.API.STREAM.NAMES",
    PROBE_SUBJECT,
    f"$JS.API.STREAM.DELETE.{PROBE}",
    "$JS.ACK.>",
)
"""What puts and takes jobs, and tries whether one could; the streams of queues are made by whoever opens one first."""
_PURGES: Final = "$JS.API.STREAM.PURGE.*"


def etcd_rights(role: Role, namespace: str) -> dict[str, str]:
    """`read` or `readwrite`, by prefix."""
    read = list(_EVERYBODY_READS)
    if role in _SERVING:
        read += [WEIGHTS_PREFIX, f"{namespace}/{NIXL_METADATA_KEY}/"]
    return {
        prefix: "readwrite" if role in (writers_of(prefix) or ()) else "read" for prefix in read
    }


def nats_rights(role: Role) -> tuple[list[str], list[str]]:
    """The subjects to which one may publish, and to which one may subscribe."""
    told = [LOAD_TOPIC, STATUS_TOPIC, KV_TOPIC]
    events, snapshots = (
        [f"trinamo.{kind}.*.*.*.{what}.*" for kind in (*told, ACTIVE_TOPIC)]
        for what in ("event", "snapshot")
    )
    # Whoever calls follows what workers tell, and tells other callers of its own requests.
    publish = [f"{REQUESTS_SUBJECT}.*", *snapshots, *_of(ACTIVE_TOPIC, events), _INBOX]
    subscribe = [*events, *_of(ACTIVE_TOPIC, snapshots), _INBOX]
    if role in _SERVING:
        publish += [*_of(told, events), *_QUEUES]
        subscribe += [f"{REQUESTS_SUBJECT}.*", *_of(told, snapshots)]
    if role is Role.OPERATOR:
        publish += [*_QUEUES, _PURGES]
    return publish, subscribe


def _of(kinds: str | Iterable[str], subjects: Iterable[str]) -> list[str]:
    wanted = {kinds} if isinstance(kinds, str) else set(kinds)
    return [each for each in subjects if each.split(".")[1] in wanted]


def rights_text(role: Role, namespace: str, key_prefix: str = "") -> Iterator[str]:
    """Lines to paste: commands for etcd's root, and a user for nats-server's configuration."""
    # Clusters that share an etcd have users of their own, else each could write the others' keys.
    name = "-".join(["trinamo", *key_prefix.split("/")[:-1], role])
    yield "# etcd, as root; then control_plane.etcd.username and password:"
    yield f"etcdctl role add {name}"
    for prefix, right in etcd_rights(role, namespace).items():
        yield f"etcdctl role grant-permission {name} --prefix=true {right} {key_prefix}{prefix}"
    yield f"etcdctl user add {name}"
    yield f"etcdctl user grant-role {name} {name}"
    yield "# nats-server, among the users of authorization; then event_plane.nats.username and password:"
    publish, subscribe = nats_rights(role)
    yield f"{{ user: {name}, password: $TRINAMO_{role.upper()}_PASSWORD, permissions: {{"
    yield f"  publish: {{ allow: [{_listed(publish)}] }}"
    yield f"  subscribe: {{ allow: [{_listed(subscribe)}] }}"
    yield "} }"


def _listed(subjects: Sequence[str]) -> str:
    return ", ".join(f'"{each}"' for each in subjects)
