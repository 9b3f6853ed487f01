"""`trinamo certs`: what closes the connections of a cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

import typer

certs_app = typer.Typer(
    name="certs",
    help="What closes the connections between the processes of a cluster.",
    epilog="Examples:  trinamo certs secret cluster.secret",
    no_args_is_help=True,
)
SECRET_BITS: Final = 256


def write_secret(path: Path) -> None:
    """Write a new secret of a cluster to `path`, which nobody else may read.

    Raises `OSError`, a `FileExistsError` if there is one: who has the old one could speak to nobody.
    """
    from trinamo.runtime.env import RealEnv

    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"{RealEnv().rng.getrandbits(SECRET_BITS):064x}\n")


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
