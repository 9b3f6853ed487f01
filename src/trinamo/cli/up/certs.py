"""`trinamo certs`: what closes the connections of a cluster."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from trinamo.transports.security.roles import Role

certs_app = typer.Typer(
    name="certs",
    help="What closes the connections between the processes of a cluster.",
    epilog=(
        "Examples:  trinamo certs secret cluster.secret\n\n"
        "trinamo certs init fleet\n\n"
        "trinamo certs issue fleet --role worker --name rack-7 --days 30\n\n"
        "trinamo certs rights --role worker"
    ),
    no_args_is_help=True,
)
SECRET_BITS: Final = 256
KEY_BYTES: Final = 32
DAY_S: Final = 86400.0
AUTHORITY: Final = "authority"
NAME: Final = r"[A-Za-z0-9][A-Za-z0-9.-]{0,59}"
EARLIER_S: Final = 3600.0
"""So long before it was made a certificate is valid: clocks differ."""


def write_secret(path: Path) -> None:
    """Write a new secret of a cluster to `path`, which nobody else may read.

    Raises `OSError`, a `FileExistsError` if there is one: who has the old one could speak to nobody.
    """
    from trinamo.runtime.env import RealEnv

    _write(path, f"{RealEnv().rng.getrandbits(SECRET_BITS):064x}\n".encode(), 0o600)


def write_authority(directory: Path, days: float) -> None:
    """Make a fleet's authority in `directory`: its certificate, and its key, which nobody else may read.

    Raises `OSError`, a `FileExistsError` if there is one: what it has issued would count no more.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from trinamo.runtime.env import RealEnv
    from trinamo.transports.security.identity import Authority, private_pem

    directory.mkdir(parents=True, exist_ok=True)
    env = RealEnv()
    now = datetime.fromtimestamp(env.clock.wall(), UTC)
    key = Ed25519PrivateKey.from_private_bytes(env.rng.randbytes(KEY_BYTES))
    made = Authority.make(
        key,
        name=f"trinamo fleet {env.rng.getrandbits(32):08x}",
        first=now - timedelta(seconds=EARLIER_S),
        last=now + timedelta(days=days),
    )
    _write(directory / f"{AUTHORITY}.key", private_pem(key), 0o600)
    _write(directory / f"{AUTHORITY}.pem", made.certificate.encode(), 0o644)


def issue_certificate(directory: Path, roles: Sequence[str], name: str, days: float) -> None:
    """Make `NAME.pem` and `NAME.key` beside the authority in `directory`, in place of what they were.

    Raises `ConfigError` for a role or a name that is none, and for an authority that cannot be read.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    from trinamo.runtime.env import RealEnv
    from trinamo.runtime.errors import ConfigError
    from trinamo.transports.security.identity import Authority

    uris = [read_role(each).uri for each in roles]
    if not re.fullmatch(NAME, name) or name == AUTHORITY:
        raise ConfigError(
            f"--name is {name!r}: letters, digits, dots and dashes, at most 60, and not {AUTHORITY!r}"
        )
    try:
        key = load_pem_private_key((directory / f"{AUTHORITY}.key").read_bytes(), None)
        shown = x509.load_pem_x509_certificate((directory / f"{AUTHORITY}.pem").read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(
            f"{error.filename}: there is none; `trinamo certs init {directory}` makes an authority"
        ) from error
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{directory}: {AUTHORITY}.key and {AUTHORITY}.pem are no pair"
        ) from error
    if not isinstance(key, Ed25519PrivateKey) or key.public_key() != shown.public_key():
        raise ConfigError(f"{directory}: {AUTHORITY}.key is not the key of {AUTHORITY}.pem")
    env, end = RealEnv(), shown.not_valid_after_utc
    if env.clock.wall() + days * DAY_S > end.timestamp():
        raise ConfigError(
            f"--days is {days:g}, and the authority itself ends on {end:%Y-%m-%d}: give fewer, or"
            " make another one"
        )
    certificate, own_key = Authority(key, shown).issue(
        uris, env, name=name, before_s=EARLIER_S, after_s=days * DAY_S
    )
    # A process that reads one of both before the other is written waits for the next look.
    for suffix, data, mode in ((".key", own_key, 0o600), (".pem", certificate, 0o644)):
        written = directory / f".{name}{suffix}"
        written.unlink(missing_ok=True)
        _write(written, data, mode)
        written.replace(directory / f"{name}{suffix}")


def read_role(text: str) -> Role:
    """The role of this name; `ConfigError` says which there are."""
    from trinamo.runtime.errors import ConfigError
    from trinamo.transports.security.roles import Role

    try:
        return Role(text)
    except ValueError:
        raise ConfigError(f"--role is {text!r}; there are {', '.join(Role)}") from None


def _write(path: Path, data: bytes, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)


@certs_app.callback()
def certs() -> None:
    """What closes the connections between the processes of a cluster."""


@certs_app.command()
def secret(
    file: Annotated[Path, typer.Argument(help="Where to put it. A file that exists stays.")],
) -> None:
    """Make the secret of a cluster: copy FILE to every machine, and name it `security.secret_file`."""
    from trinamo.runtime.errors import ConfigError

    try:
        write_secret(file)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error
    typer.echo(
        f"wrote {file}: copy it to every machine of the cluster, and set security.secret_file there"
    )


@certs_app.command()
def init(
    directory: Annotated[Path, typer.Argument(help="Where to put it. An authority stays.")],
    days: Annotated[float, typer.Option(min=1, help="How long it may issue.")] = 3650,
) -> None:
    """Make an authority of a fleet: who may what is said by the certificates that it issues."""
    from trinamo.runtime.errors import ConfigError

    try:
        write_authority(directory, days)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from error
    typer.echo(
        f"wrote {directory / AUTHORITY}.pem: copy it to every machine, and set"
        f" security.tls.authority_file there\nwrote {directory / AUTHORITY}.key: keep it off the"
        " fleet; who has it can be anybody"
    )


@certs_app.command()
def issue(
    directory: Annotated[
        Path, typer.Argument(help="Where `trinamo certs init` put the authority.")
    ],
    role: Annotated[
        list[str],
        typer.Option(help="frontend, worker, prefill or operator; may be given several times."),
    ],
    name: Annotated[str, typer.Option(help="Of the machine or the group that gets it.")],
    days: Annotated[float, typer.Option(min=0.01, help="How long it is valid.")] = 90,
) -> None:
    """Issue a certificate that says a role; once more before it expires, with the same NAME."""
    from trinamo.runtime.errors import ConfigError

    try:
        issue_certificate(directory, role, name, days)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from error
    typer.echo(
        f"wrote {directory / name}.pem and {directory / name}.key, for {days:g} days: copy both to"
        " its machine, and set security.tls.certificate_file and security.tls.key_file there"
    )


@certs_app.command()
def rights(
    role: Annotated[str, typer.Option(help="frontend, worker, prefill or operator.")],
    namespace: Annotated[str, typer.Option(help="As worker.namespace.")] = "trinamo",
    key_prefix: Annotated[str, typer.Option(help="As control_plane.etcd.key_prefix.")] = "",
) -> None:
    """Print what makes users of etcd and NATS with the least that a role needs."""
    from trinamo.runtime.config.config import load_config

    from .rights import rights_text

    load_config(environ={}, overrides={"control_plane.etcd.key_prefix": key_prefix})
    for line in rights_text(read_role(role), namespace, key_prefix):
        typer.echo(line)
