"""The backends of KV transfers that `data_plane` asks for, opened in their order.

A library is imported only once its backend is configured. What is wrong with the configuration
stops the start; a library or device that is not there only costs its backend, for tcp carries
everything.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec

from trinamo.runtime.config.planes import DataPlaneConfig
from trinamo.runtime.env import Env
from trinamo.runtime.errors import BackendMissingError
from trinamo.runtime.planes import TransferPlane
from trinamo.runtime.planes.transports import TransferChain
from trinamo.transports.one_sided.mover import OneSidedMover
from trinamo.transports.tcp import (
    TcpMover,
    TcpOptions,
    TransferOptions,
    open_transfer_plane,
)

_log = logging.getLogger("trinamo.transfer")


@asynccontextmanager
async def open_transfer_chain(
    section: DataPlaneConfig, env: Env, options: TcpOptions | None = None
) -> AsyncIterator[TransferChain]:
    """Open the backends that are configured; those this machine cannot use are named in `missing`.

    `options` are what all TCP planes share; without a secret only loopback is bound.

    Raises `ConfigError` for a setting that a device does not have, and an address that cannot be
    bound. Opening NIXL or Mooncake takes up to two seconds, in a thread.
    """
    found: dict[str, TransferPlane] = {}
    missing: dict[str, str] = {}
    order: list[str] = []
    async with AsyncExitStack() as stack:
        # First, though it is tried last: it knows the address that peers reach this machine at, and
        # its port must be refused to nobody before all others are closed
        # (`protocol/transfer/settlement.py`).
        transfer = section.transfer
        # As the other TCP planes, with an address of its own if there is one.
        own: dict[str, Any] = {"port": transfer.port}
        if transfer.host is not None:
            own |= {"host": transfer.host, "interface": None}
        if transfer.advertise_host is not None:
            own["advertise_host"] = transfer.advertise_host
        options = msgspec.structs.replace(options or TcpOptions.of(section.tcp), **own)
        tcp = await stack.enter_async_context(
            open_transfer_plane(
                TransferOptions(
                    tcp=options,
                    slice_bytes=transfer.slice_bytes,
                    checksum=transfer.checksum,
                ),
                env,
            )
        )

        @stack.callback
        def outlive() -> None:
            # The others are closed. Where one of them still moves bytes, nobody may take us for dead.
            tcp.mover.outlives_us = any(
                isinstance(plane.mover, OneSidedMover) and plane.mover.is_left_moving
                for plane in found.values()
            )

        found[tcp.backend] = tcp
        for name in section.backends:
            # `mooncake_tcp` is Mooncake without RDMA; nothing after this line knows the word.
            backend, _, protocol = name.partition("_")
            order.append(backend)
            try:
                if backend == "nixl":
                    found[backend] = await stack.enter_async_context(
                        _open_nixl(section, env, tcp.incarnation)
                    )
                elif backend == "mooncake":
                    found[backend] = await stack.enter_async_context(
                        _open_mooncake(section, tcp, env, has_rdma=not protocol)
                    )
            except BackendMissingError as error:
                missing[backend] = error.message
                _log.warning("transfers do without %s: %s; see trinamo doctor", backend, error)
        planes = [found[backend] for backend in order if backend in found]
        _log.info("transfers by %s", ", then ".join(plane.backend for plane in planes))
        yield TransferChain(planes=planes, order=order, missing=missing, settlement=tcp.mover)


def _open_nixl(
    section: DataPlaneConfig, env: Env, incarnation: str
) -> AbstractAsyncContextManager[TransferPlane]:
    from trinamo.transports.nixl.options import NixlOptions
    from trinamo.transports.nixl.plane import open_nixl_plane

    options = NixlOptions.of(section.nixl, **_of_every_backend(section))
    return open_nixl_plane(options, env, incarnation=incarnation)


def _open_mooncake(
    section: DataPlaneConfig, tcp: TransferPlane[TcpMover], env: Env, *, has_rdma: bool
) -> AbstractAsyncContextManager[TransferPlane]:
    from trinamo.transports.mooncake.engine import MooncakeOptions
    from trinamo.transports.mooncake.plane import open_mooncake_plane

    options = MooncakeOptions.of(
        section.mooncake,
        protocol="rdma" if has_rdma else "tcp",
        device=section.mooncake.device if has_rdma else None,
        # It binds all addresses, whatever it is told; this is what peers are told.
        host=tcp.mover.address.rpartition(":")[0].strip("[]"),
        **_of_every_backend(section),
    )
    return open_mooncake_plane(options, env, incarnation=tcp.incarnation)


def _of_every_backend(section: DataPlaneConfig) -> dict[str, float]:
    return {
        "connect_timeout_s": section.tcp.connect_timeout_s,
        "drain_s": section.transfer.settle_timeout_s,
    }
