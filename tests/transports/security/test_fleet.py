"""A fleet's own authority: what of its files is refused, who may what, and renewal beside streams."""

from __future__ import annotations

import itertools
import shutil
import ssl
from collections.abc import AsyncGenerator, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from tests.conformance.requests.service import stream, unary
from tests.transports.security.fleets import FleetOfTest, Step
from tests.transports.security.test_identity import SECRET, SetClock, SetEnv
from tests.transports.security.test_signed import ED25519, ONE, VALUE, value
from tests.transports.tcp.ends import eventually, lone_client, options
from tests.transports.tcp.test_greeting import NAME, between, flipping, greeted_by, listening
from trinamo.runtime.caller.unary import UnaryAttempt
from trinamo.runtime.config.config import SecurityConfig, SecurityTlsConfig, load_config
from trinamo.runtime.context import Context
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import ConfigError, ConnectError, ImpostorError, RequestError
from trinamo.runtime.metrics.metrics import Metrics
from trinamo.runtime.planes import ControlPlane, RequestPlane
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.streams.membership import HELLO_BYTES, Purpose
from trinamo.runtime.protocol.streams.request import (
    AckStatus,
    Envelope,
    RequestAnswer,
    raise_for_nack,
)
from trinamo.runtime.protocol.undecodable import Unsigned
from trinamo.runtime.worker.endpoint import Endpoint
from trinamo.runtime.worker.worker import Worker
from trinamo.transports.memory.control import MemoryControlPlane
from trinamo.transports.memory.store import MemoryStore
from trinamo.transports.security.fleet import Fleet, FleetCertificate, fleet_certificate
from trinamo.transports.security.identity import (
    Authority,
    Identity,
    authority_of,
    contexts_of,
    session_of,
)
from trinamo.transports.security.roles import DIALS, LISTENS, WRITES, Role
from trinamo.transports.security.signed import signed_control
from trinamo.transports.sockets.wire import TlsSession, send_all
from trinamo.transports.tcp import open_request_plane, open_request_server
from trinamo.transports.tcp.greeting import dial_member
from trinamo.transports.tcp.sockets import TcpOptions

DAY_S = 86400.0


@pytest.fixture
def fleet(tmp_path: Path) -> FleetOfTest:
    return FleetOfTest.make(tmp_path / "fleet")


def using(member: Fleet) -> TcpOptions:
    return options(secret=SECRET, fleet=member)


# --- files ---------------------------------------------------------------------------------------------


Spoil = Callable[[FleetOfTest, SecurityTlsConfig], SecurityTlsConfig | None]


def _of_another(fleet: FleetOfTest, section: SecurityTlsConfig) -> SecurityTlsConfig:
    other = FleetOfTest.make(fleet.directory / "other").section("worker")
    return msgspec.structs.replace(section, authority_file=other.authority_file)


def _key_of_another(fleet: FleetOfTest, section: SecurityTlsConfig) -> SecurityTlsConfig:
    return msgspec.structs.replace(section, key_file=fleet.section("frontend").key_file)


def _locked(_: FleetOfTest, section: SecurityTlsConfig) -> None:
    assert section.key_file is not None
    path, form = Path(section.key_file), serialization.PrivateFormat.PKCS8
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    lock = serialization.BestAvailableEncryption(b"secret")
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, lock))


def _ecdsa(_: FleetOfTest, section: SecurityTlsConfig) -> None:
    assert section.key_file is not None
    form, no = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    key = ec.generate_private_key(ec.SECP256R1())
    Path(section.key_file).write_bytes(key.private_bytes(serialization.Encoding.PEM, form, no))


def _unknown_kind(_: FleetOfTest, section: SecurityTlsConfig) -> None:
    """Of the three places that name Ed25519 the second is that of the key."""
    assert section.certificate_file is not None
    path = Path(section.certificate_file)
    parts = ssl.PEM_cert_to_DER_cert(path.read_text()).split(ED25519)
    other = ED25519.join(parts[:2]) + ED25519[:2] + b"\x27" + ED25519[3:] + ED25519.join(parts[2:])
    path.write_text(ssl.DER_cert_to_PEM_cert(other))


def _gone(_: FleetOfTest, section: SecurityTlsConfig) -> SecurityTlsConfig:
    return msgspec.structs.replace(section, authority_file="/none")


def _nothing(_: FleetOfTest, section: SecurityTlsConfig) -> None:
    assert section.certificate_file is not None
    Path(section.certificate_file).write_text("nothing")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_of_another, r"tls\.certificate_file: was issued by .* not in authority_file"),
        (_key_of_another, r"tls\.key_file: is not the key of certificate_file"),
        (_unknown_kind, r"tls\.key_file: is not the key of certificate_file"),
        (_locked, r"tls\.key_file: the key is locked by a password"),
        (_ecdsa, r"tls\.key_file: is no Ed25519 key.*certs issue"),
        (_gone, r"security\.tls\.authority_file: /none: No such file"),
        (_nothing, r"tls\.certificate_file: holds no certificate as PEM"),
    ],
)
def test_files_that_cannot_be_used_are_refused_with_a_sentence(
    fleet: FleetOfTest, spoil: Spoil, said: str
) -> None:
    section = fleet.section("worker")
    with pytest.raises(ConfigError, match=said):
        Fleet.of(spoil(fleet, section) or section, RealEnv())


def test_what_has_expired_is_refused(fleet: FleetOfTest) -> None:
    section, now = fleet.section("worker", days=1), RealEnv().clock.wall()
    with pytest.raises(ConfigError, match=r"certificate_file: expired on .* renew it"):
        Fleet.of(section, SetEnv(SetClock(now + 1.1 * DAY_S)))
    with pytest.raises(ConfigError, match=r"--days is 30, and the authority itself ends on"):
        fleet.section("worker", days=30)
    end = datetime.fromtimestamp(now + DAY_S, UTC)
    authority = Authority.make(ed25519.Ed25519PrivateKey.generate(), last=end)
    certificate, key = authority.issue([Role.WORKER.uri], RealEnv(), after_s=3 * DAY_S)
    with pytest.raises(ConfigError, match=r"authority_file: expired on"):
        fleet_certificate(
            certificate.decode(), key.decode(), authority.certificate, now=now + 2 * DAY_S
        )


def test_the_authority_needs_all_its_files_and_the_secret_beside_it() -> None:
    with pytest.raises(ValueError, match="certificate_file needs key_file and authority_file"):
        SecurityTlsConfig(certificate_file="a")
    with pytest.raises(ValueError, match=r"tls\.change is admit, but certificate_file is null"):
        SecurityTlsConfig(change="admit")
    tls = SecurityTlsConfig(certificate_file="a", key_file="b", authority_file="c")
    with pytest.raises(ValueError, match=r"secret_file is null: .* NATS is sealed"):
        SecurityConfig(tls=tls)


def test_etcd_and_nats_have_the_same_authority_unless_told_otherwise() -> None:
    tls = {f"security.tls.{key}_file": key for key in ("certificate", "key", "authority")}
    given = {"security.secret_file": "secret", "control_plane.etcd.tls.enabled": True}
    given |= {"event_plane.nats.tls.enabled": True, "event_plane.nats.tls.ca_file": "other"}
    config = load_config(overrides=given | tls, environ={})
    assert config.control_plane.etcd.tls.ca_file == "authority"
    assert config.event_plane.nats.tls.ca_file == "other"
    assert load_config(overrides=given, environ={}).control_plane.etcd.tls.ca_file is None


# --- connections ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize(("dials", "listens"), [*itertools.product(Role, Role)])
async def test_roles_decide_who_listens_and_who_asks(
    fleet: FleetOfTest, purpose: Purpose, dials: Role, listens: Role
) -> None:
    ours, theirs = using(fleet.member(dials)), using(fleet.member(listens))
    async with listening(theirs, purpose=purpose) as (address, refused):

        async def dial() -> str:
            with trio.fail_after(120):
                wire, name = await dial_member(address, ours, RealEnv(), purpose)
            wire.socket.close()
            return name

        if dials not in DIALS[purpose]:
            with pytest.raises(ConnectError, match="a certificate of this role may not ask there"):
                await dial()
            await eventually(lambda: refused)
            assert f"its certificate says {dials}, and {purpose} are for" in refused[0]
        elif listens not in LISTENS[purpose]:
            said = f"certificate says {listens}, and {purpose} are of"
            with pytest.raises(ImpostorError, match=said):
                await dial()
        else:
            assert await dial() == NAME


@pytest.mark.parametrize("ask", [stream, unary])
async def test_what_is_for_workers_is_refused_to_whose_certificate_says_another_role(
    fleet: FleetOfTest, ask: Callable[..., Envelope]
) -> None:
    async def items(_: object, __: Context) -> AsyncGenerator[int, None]:
        yield 1

    async def result(_: object, __: Context) -> int:
        return 1

    worker = Worker(lone_client(), RealEnv(), instance_id="a1")
    for name, for_workers in (("anybody", False), ("workers", True)):
        handler: dict[str, Any] = {"stream": items} if ask is stream else {"unary": result}
        worker.add(Endpoint(EndpointName("ns", "c", name), for_workers=for_workers, **handler))
    server = open_request_server(using(fleet.member("worker")), RealEnv(), instance_id="a1")
    async with server as listening, trio.open_nursery() as nursery:
        await nursery.start(worker.run)
        await nursery.start(listening.serve, worker)
        refused = 0
        for role in Role:
            ours = using(fleet.member(role, name=f"asks-as-{role}"))
            async with open_request_plane(ours, RealEnv()) as plane:
                anybody = await answer_to(plane, listening.address, ask(f"{role}1", "anybody"))
                workers = await answer_to(plane, listening.address, ask(f"{role}2", "workers"))
            assert anybody.status is AckStatus.ACCEPTED
            if role in LISTENS[Purpose.REQUESTS]:
                assert workers.status is AckStatus.ACCEPTED
            else:
                refused += 1
                with pytest.raises(
                    RequestError, match="ns/c/workers is for workers, and your cert"
                ):
                    raise_for_nack(workers)
        requests = worker._metrics.requests
        assert requests.tally("ns/c/workers", str(AckStatus.INVALID)).value == refused == 2
        nursery.cancel_scope.cancel()


async def answer_to(plane: RequestPlane, address: str, envelope: Envelope) -> RequestAnswer:
    with trio.fail_after(120):
        answer, _ = await UnaryAttempt(Context(envelope.id)).run(plane, address, envelope, b"\xc0")
    return answer


async def test_a_frontend_is_no_worker_and_a_worker_is(fleet: FleetOfTest) -> None:
    frontend = using(fleet.member("frontend"))
    async with listening(using(fleet.member("worker"))) as (address, _):
        assert await greeted_by(address, frontend) == (NAME, b"hear")
    async with listening(using(fleet.member("frontend", name="another"))) as (address, _):
        with pytest.raises(ImpostorError, match="says frontend, and requests are of prefill or w"):
            await greeted_by(address, frontend)


async def test_who_hands_connections_on_to_another_worker_hands_on_its_name(
    fleet: FleetOfTest,
) -> None:
    """Which callers compare with the one they mean; nobody between can change it."""
    frontend = using(fleet.member("frontend"))
    async with listening(using(fleet.member("worker")), name="another") as (address, _):
        async with between(address, lambda data, _: data) as middle:
            name, _ = await greeted_by(middle, frontend)
        assert name == "another"
        for place in (HELLO_BYTES - 1, HELLO_BYTES + 5, 600):
            async with between(address, flipping(place)) as middle:
                with pytest.raises(ConnectError):
                    await greeted_by(middle, using(fleet.member("frontend")))


async def test_a_certificate_may_say_several_roles(fleet: FleetOfTest) -> None:
    both = using(fleet.member("frontend", "worker"))
    async with listening(both) as (address, _):
        assert await greeted_by(address, both) == (NAME, b"hear")


async def test_who_has_the_secret_alone_speaks_to_nobody_of_the_fleet(fleet: FleetOfTest) -> None:
    member, outsider = using(fleet.member("worker")), options(secret=SECRET)
    for dials, listens in ((member, outsider), (outsider, member)):
        async with listening(listens) as (address, refused):
            with pytest.raises(ConnectError, match="is another"):
                await greeted_by(address, dials)
            await eventually(lambda: refused)


async def test_a_certificate_of_another_authority_speaks_to_nobody(
    fleet: FleetOfTest, tmp_path: Path
) -> None:
    member = using(fleet.member("worker"))
    outsider = using(FleetOfTest.make(tmp_path / "other").member("worker"))
    for dials, listens in ((member, outsider), (outsider, member)):
        async with listening(listens) as (address, refused):
            with pytest.raises(ConnectError, match=r"tls\.authority_file is another"):
                await greeted_by(address, dials)
            await eventually(lambda: refused)


async def test_a_peer_whose_certificate_has_expired_is_told_apart(fleet: FleetOfTest) -> None:
    """It was valid when that process read it."""
    clock = SetClock(RealEnv().clock.wall())
    member, late = fleet.member("worker", days=1), fleet.member("worker", env=SetEnv(clock), days=9)
    clock.at += 2 * DAY_S
    async with listening(using(member)) as (address, _):
        with pytest.raises(ConnectError, match="was not renewed, or the clocks"):
            await greeted_by(address, using(late))


async def test_what_an_authority_issues_that_has_ended_counts_for_nothing(
    fleet: FleetOfTest, tmp_path: Path
) -> None:
    """Before: while it stood in the file, its key made whoever had it a member."""
    now = RealEnv().clock.wall()
    ends = [datetime.fromtimestamp(now + days * DAY_S, UTC) for days in (-40, -30)]
    key = ed25519.Ed25519PrivateKey.generate()
    ended = Authority.make(key, name="ended", first=ends[0], last=ends[1])
    both = tmp_path / "both.pem"
    own = await trio.Path(fleet.directory / "authority.pem").read_text()
    both.write_text(own + ended.certificate)
    shown, its_key = (each.decode() for each in ended.issue([Role.WORKER.uri], RealEnv()))

    def load() -> FleetCertificate:
        return fleet_certificate(shown, its_key, both.read_text(), now=now - 35 * DAY_S)

    his = Fleet(load, RealEnv())
    section = msgspec.structs.replace(fleet.section("worker"), authority_file=str(both))
    member = Fleet.of(section, RealEnv())
    for dials, listens in ((his, member), (member, his)):
        async with listening(using(listens)) as (address, _):
            with pytest.raises(ConnectError, match="is another"):
                await greeted_by(address, using(dials))
    store = MemoryStore()
    await plane(store, his).put(ONE.key, VALUE)
    assert isinstance(await value(plane(store, member)), Unsigned)


# --- renewal -------------------------------------------------------------------------------------------


async def test_new_connections_show_the_new_certificate_while_a_stream_goes_on(
    fleet: FleetOfTest, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinamo.transports.security.fleet._RENEWAL_INTERVAL_S", 0.01)
    worker, frontend = fleet.member("worker"), using(fleet.member("frontend"))
    before = worker.certificate
    # Of a day a tenth is left.
    metrics = Metrics(SetEnv(SetClock(before.expires_at - 0.1 * DAY_S)))
    async with listening(using(worker)) as (address, _), trio.open_nursery() as nursery:
        nursery.start_soon(worker.keep, metrics)
        wire, _ = await dial_member(address, frontend, RealEnv(), Purpose.REQUESTS)

        async def echo() -> bytes:
            assert wire.seal is not None
            await send_all(wire, wire.seal(b"a token"))
            return await wire.receive(100)

        assert await echo() == b"a token"
        fleet.section("worker", days=9)
        await eventually(lambda: worker.certificate.shown != before.shown)
        await eventually(
            lambda: (
                metrics.value("certificate_expiry_timestamp_seconds", use="members")
                == worker.certificate.expires_at
            )
        )
        assert await echo() == b"a token"
        assert await greeted_by(address, frontend) == (NAME, b"hear")
        assert [m for m in caplog.messages if "renew it" in m] == [
            f"the certificate of {fleet.directory}/worker.pem expires in 2 hours: renew it"
        ]

        await trio.Path(fleet.directory / "worker.pem").write_text("half")
        await eventually(lambda: metrics.value("certificate_renewal_broken", use="members") == 1)
        assert await greeted_by(address, frontend) == (NAME, b"hear")
        wire.socket.close()
        nursery.cancel_scope.cancel()


async def test_an_authority_takes_another_s_place_while_both_are_in_the_file(
    fleet: FleetOfTest, tmp_path: Path
) -> None:
    """Each step is one file that changes; neighbouring steps speak."""
    new = FleetOfTest.make(tmp_path / "new")
    both = tmp_path / "both.pem"
    with both.open("wb") as out:
        for each in (fleet, new):
            with (each.directory / "authority.pem").open("rb") as pem:
                shutil.copyfileobj(pem, out)
    of_old, of_new = fleet.section("worker"), new.section("worker")
    steps = [
        Fleet.of(each, RealEnv())
        for each in (
            of_old,
            msgspec.structs.replace(of_old, authority_file=str(both)),
            msgspec.structs.replace(of_new, authority_file=str(both)),
            of_new,
        )
    ]
    for before, after in itertools.pairwise(steps):
        for dials, listens in ((before, after), (after, before)):
            async with listening(using(listens)) as (address, _):
                assert await greeted_by(address, using(dials)) == (NAME, b"hear")


async def test_who_admits_a_fleet_reads_of_another_authority_as_others_do(
    fleet: FleetOfTest, tmp_path: Path
) -> None:
    """Before: in the first step of a change the one that was there at the start was let in, for good."""
    admits = fleet.changing("admit", "worker", secret=SECRET)
    theirs = using(admits)
    async with listening(theirs) as (address, _):
        ours = using(fleet.changing("show", "frontend", secret=SECRET))
        assert await greeted_by(address, ours) == (NAME, b"hear")
        new = FleetOfTest.make(tmp_path / "new")
        new.section("worker", name="worker.admit")
        for each in ("authority.pem", "worker.admit.pem", "worker.admit.key"):
            shutil.copyfile(new.directory / each, fleet.directory / each)
        admits._files.renew()
        ours = using(new.changing("show", "frontend", secret=SECRET))
        assert await greeted_by(address, ours) == (NAME, b"hear")


# --- from a secret to an authority, and back ---------------------------------------------------------

STEPS = ("before", "admit", "show", None)


def at_step(fleet: FleetOfTest, step: str | None, *roles: str) -> Fleet | None:
    """What a process shows that is at one of `STEPS`."""
    return None if step == "before" else fleet.changing(cast("Step", step), *roles, secret=SECRET)


@pytest.mark.parametrize(("dials", "listens"), [*itertools.product(STEPS, STEPS)])
async def test_who_is_one_step_apart_speaks_and_who_is_two_does_not(
    fleet: FleetOfTest, dials: str | None, listens: str | None
) -> None:
    ours = options(secret=SECRET, fleet=at_step(fleet, dials, "frontend"))
    theirs = options(secret=SECRET, fleet=at_step(fleet, listens, "worker"))
    async with listening(theirs) as (address, _):
        if abs(STEPS.index(dials) - STEPS.index(listens)) <= 1:
            assert await greeted_by(address, ours) == (NAME, b"hear")
        else:
            with pytest.raises(ConnectError, match="is another"):
                await greeted_by(address, ours)


@pytest.mark.parametrize("step", ["admit", "show"])
async def test_a_change_gives_nobody_a_role_or_a_name_that_its_certificate_does_not_say(
    fleet: FleetOfTest, step: Step
) -> None:
    ours = options(secret=SECRET, fleet=at_step(fleet, step, "frontend"))
    theirs = options(secret=SECRET, fleet=fleet.changing("show", "frontend", secret=SECRET))
    async with listening(theirs) as (address, _):
        with pytest.raises(ImpostorError, match="says frontend, and requests are of prefill or w"):
            await greeted_by(address, ours)
    worker = fleet.changing("admit", "worker", secret=SECRET)
    theirs = options(secret=SECRET, fleet=worker)
    theirs.identities[SECRET, b"", Purpose.REQUESTS.uri(NAME)] = Identity(
        *(SECRET, Purpose.REQUESTS.uri("another"), RealEnv()),
        authorities=worker.certificate.authorities,
    )
    async with listening(theirs) as (address, _):
        with pytest.raises(ImpostorError, match=r"'7f', but its certificate says .*/another"):
            await greeted_by(address, ours)


class OfNoRole(Fleet):
    """A certificate that the fleet's authority issued to somebody else, such as a web server."""

    def __init__(self, fleet: FleetOfTest) -> None:
        paths = (fleet.directory / f"authority.{each}" for each in ("key", "pem"))
        key, shown = (path.read_bytes() for path in paths)
        private = serialization.load_pem_private_key(key, None)
        assert isinstance(private, ed25519.Ed25519PrivateKey)
        authority = Authority(private, x509.load_pem_x509_certificate(shown))
        issued = authority.issue(["spiffe://company/web"], RealEnv())
        trusted = shown.decode() + authority_of(SECRET).certificate
        self._contexts = contexts_of(*issued, trusted)
        self._env = RealEnv()
        self._change = "show"

    def session(self, *, dials: bool) -> TlsSession:
        return session_of(self._contexts, dials=dials)

    def check_listener(self, peer: Sequence[str], purpose: Purpose, name: str) -> None:
        """Whoever listens is dialled."""


@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize("step", ["admit", "show", None])
async def test_a_certificate_without_a_role_asks_for_nothing_at_any_step(
    fleet: FleetOfTest, step: Step, purpose: Purpose
) -> None:
    """Before: while a cluster changed, whatever the authority had issued asked, and moved blocks."""
    theirs = options(secret=SECRET, fleet=at_step(fleet, step, "worker"))
    async with listening(theirs, purpose=purpose) as (address, refused):
        with pytest.raises(ConnectError, match="before it was greeted"):
            await dial_member(address, using(OfNoRole(fleet)), RealEnv(), purpose)
        await eventually(lambda: any("says no role" in each for each in refused))


@pytest.mark.parametrize(("writes", "reads"), [*itertools.product(STEPS, STEPS)])
async def test_entries_count_where_what_signed_them_is_let_in(
    fleet: FleetOfTest, writes: str | None, reads: str | None
) -> None:
    store = MemoryStore()
    await plane(store, at_step(fleet, writes, "worker")).put(ONE.key, VALUE)
    said = await value(plane(store, at_step(fleet, reads, "frontend")))
    is_of_secret = writes in ("before", "admit")
    assert isinstance(said, Unsigned) is (reads == (None if is_of_secret else "before"))


# --- entries -------------------------------------------------------------------------------------------


def plane(store: MemoryStore, member: Fleet | None) -> ControlPlane:
    return signed_control(MemoryControlPlane(store), RealEnv(), [SECRET], member)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("prefix", [*WRITES, "ns/nixl_metadata/"])
async def test_an_entry_counts_by_the_role_of_who_signed_it(
    fleet: FleetOfTest, prefix: str, role: Role
) -> None:
    store, key = MemoryStore(), f"{prefix}a/{ONE.id}"
    await plane(store, fleet.member(role)).put(key, b"{}")
    entry = await plane(store, fleet.member("operator", name="reader")).get(key)
    assert entry is not None
    may = role in WRITES.get(prefix, {Role.WORKER, Role.PREFILL})
    assert isinstance(entry.value, Unsigned) is not may
    if isinstance(entry.value, Unsigned):
        assert f"role/{role} may not write it" in entry.value.fault


async def test_the_secret_alone_signs_nothing_that_a_fleet_believes(fleet: FleetOfTest) -> None:
    store = MemoryStore()
    await plane(store, None).put(ONE.key, VALUE)
    assert isinstance(await value(plane(store, fleet.member("frontend"))), Unsigned)
