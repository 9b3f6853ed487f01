"""The authority of a secret, what a process shows of it, and whom it takes for one of its own."""

from __future__ import annotations

import random
import ssl

import attrs
import pytest
from cryptography import x509

from tests.leftovers import open_descriptors
from trinamo.runtime.env import Clock, RealEnv
from trinamo.runtime.errors import ConnectError
from trinamo.transports.security.identity import RENEWED_S, VALID_S, Authority, Identity
from trinamo.transports.sockets.wire import TlsSession

SECRET, ANOTHER = (
    b"the secret of these tests, which is long",
    b"another secret, which is as long as it",
)
NOW = 1_800_000_000.0


@attrs.define
class SetClock(Clock):
    """A wall clock that a test sets."""

    at: float = NOW

    def wall(self) -> float:
        return self.at

    def now(self) -> float:
        return self.at


@attrs.define
class SetEnv:
    clock: Clock = attrs.Factory(SetClock)
    rng: random.Random = attrs.Factory(lambda: random.Random(1))

    def note(self, kind: str, /, **fields: object) -> None:
        pass


def shake(dials: TlsSession, listens: TlsSession) -> None:
    """Both ends, until each is done. Raises what an end raises."""
    data, is_done = b"", False
    while not is_done:
        dials.shake(data)
        is_done = listens.shake(dials.pending())
        data = listens.pending()


def identity(
    secret: bytes = SECRET, uri: str = "trinamo://requests/7f", at: float = NOW
) -> Identity:
    return Identity(secret, uri, SetEnv(SetClock(at)))


def test_each_process_derives_the_same_authority_and_another_of_another_secret() -> None:
    assert Authority.derived(SECRET).certificate == Authority.derived(SECRET).certificate
    assert Authority.derived(SECRET).certificate != Authority.derived(ANOTHER).certificate


def test_what_is_issued_replays_from_the_env_and_names_who_it_is_for() -> None:
    first, second = (
        Authority.derived(SECRET).issue(["trinamo://requests/7f"], SetEnv())[0] for _ in range(2)
    )
    assert first == second
    [found] = x509.load_pem_x509_certificates(first)
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["trinamo://requests/7f"]
    lasts = found.not_valid_after_utc - found.not_valid_before_utc
    assert lasts.total_seconds() == 2 * VALID_S
    assert found.not_valid_after_utc.timestamp() == NOW + VALID_S


def test_both_ends_learn_who_the_other_is_and_speak_tls_1_3() -> None:
    caller, worker = identity(uri="trinamo://requests/"), identity()
    dials, listens = caller.session(dials=True), worker.session(dials=False)
    shake(dials, listens)
    assert caller.peer_of(dials) == ["trinamo://requests/7f"]
    assert worker.peer_of(listens) == ["trinamo://requests/"]
    assert dials._object.version() == "TLSv1.3"
    assert listens.open(dials.seal(b"a prompt")) == b"a prompt"


@pytest.mark.parametrize("secrets", [(SECRET, ANOTHER), (ANOTHER, SECRET)])
def test_another_secret_shakes_no_hands(secrets: tuple[bytes, bytes]) -> None:
    ours, theirs = secrets
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(identity(ours).session(dials=True), identity(theirs).session(dials=False))


def test_who_shows_no_certificate_is_refused() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        shake(TlsSession(context, "trinamo"), identity().session(dials=False))


def test_a_member_s_certificate_issues_no_other() -> None:
    """Its key is no authority's: who stole one is one member, and makes no more."""
    [found] = x509.load_pem_x509_certificates(
        Authority.derived(SECRET).issue(["trinamo://x/"], SetEnv())[0]
    )
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


@pytest.mark.parametrize("apart_s", [-1.1 * VALID_S, 1.1 * VALID_S])
def test_a_certificate_that_is_out_of_date_is_told_with_what_to_do(apart_s: float) -> None:
    caller, worker = identity(), identity(at=NOW + apart_s)
    dials, listens = caller.session(dials=True), worker.session(dials=False)
    shake(dials, listens)
    for each, session in ((caller, dials), (worker, listens)):
        with pytest.raises(ConnectError, match="clocks of both machines"):
            each.peer_of(session)


def test_clocks_may_differ_by_hours() -> None:
    caller, worker = identity(), identity(at=NOW + 0.9 * VALID_S)
    dials, listens = caller.session(dials=True), worker.session(dials=False)
    shake(dials, listens)
    assert caller.peer_of(dials) == worker.peer_of(listens) == ["trinamo://requests/7f"]


def test_a_process_that_runs_for_long_shows_a_new_certificate() -> None:
    clock = SetClock()
    worker = Identity(SECRET, "trinamo://requests/7f", SetEnv(clock))
    shown = []
    for at in (NOW, NOW + RENEWED_S - 1, NOW + RENEWED_S + 1, NOW + 10 * VALID_S):
        clock.at = at
        caller = identity(at=at)
        dials = caller.session(dials=True)
        shake(dials, worker.session(dials=False))
        caller.peer_of(dials)
        certificate = dials.peer_certificate()
        assert certificate is not None
        shown.append(certificate["serialNumber"])
    assert shown[0] == shown[1]
    assert len(set(shown)) == 3


def test_no_descriptor_stays() -> None:
    before = open_descriptors()
    Identity(SECRET, "trinamo://requests/7f", RealEnv())
    assert open_descriptors() <= before
