"""Model files in a process: a worker lends its own, and takes one before it opens its engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs
import msgspec
import trio

from ...config.config import Config
from ...env import Env
from ...errors import ConfigError, TrinamoError
from ...kv.transfer.metrics import TransferMetrics
from ...kv.transfer.router import open_transfer_router
from ...weights.files import manifest_of, open_partial
from ...weights.lender import HeldFile, Lender, WeightsMetrics, register_window
from ...weights.messages import Ask, Want, encode_weights_card, weights_key
from ...weights.taker import DownloadProgress, MissingFile, Taker, find_offers, weights_endpoint
from ..opening import open_runtime
from ..runtime import Runtime
from ..transports import Transports

_log = logging.getLogger("trinamo.weights")
_LOOK_S: Final = 0.5


@attrs.frozen
class WorkerWeights:
    """The model files that a worker has, and what is counted about them."""

    files: Sequence[HeldFile]
    metrics: WeightsMetrics

    def lender(self, runtime: Runtime) -> Lender | None:
        """What lends them, once `lend_weights` runs; None if there is nothing to lend."""
        worker, section = runtime.worker, runtime.config.weights
        if not self.files or not section.enabled:
            return None
        return Lender(
            section,
            self.metrics,
            runtime.env.rng,
            hop=trio.to_thread.run_sync,
            is_draining=lambda: worker is None or worker.is_draining,
        )


async def lend_weights(
    runtime: Runtime,
    transports: Transports,
    weights: WorkerWeights,
    lender: Lender,
    metadata: Mapping[str, str],
) -> None:
    """Offer the files to the cluster until cancelled; what keeps us from it is logged.

    `metadata` is for people, as that of the model's endpoint. Each file is read once for its
    digests, beside serving.
    """
    config = runtime.config
    section = config.weights
    try:
        for file in weights.files:
            lender.add(
                file, await manifest_of(file.path, section.chunk_bytes, trio.to_thread.run_sync)
            )
        chosen = _with_port(config, section.port)
        async with transports.open_transfers(chosen, runtime.env) as chain:
            lender.open_with(*await register_window(chain.planes, section))
            instance = await runtime.serve_bidirectional(
                weights_endpoint(config.worker.namespace),
                lender.lend,
                request_type=Ask,
                input_type=Want,
                metadata={**metadata, "for": "weights"},
                # A full worker is whom those come to help that need its file.
                for_workers=True,
            )
            for sha256, card in lender.cards(config.worker.namespace):
                await runtime.publish(weights_key(sha256, instance.id), encode_weights_card(card))
                _log.info("the weights of %s are offered to peers: %s", card.model, sha256)
            await trio.sleep_forever()
    except (TrinamoError, OSError) as error:
        _log.warning("no weights are offered to peers: %s", error)


async def take_weights(
    config: Config,
    env: Env,
    transports: Transports,
    wanted: MissingFile,
    target: Path,
    *,
    metrics: WeightsMetrics,
    patience_s: float,
    report: Callable[[DownloadProgress], None] = lambda _: None,
    who: str = "",
) -> bool:
    """Take a file from whoever has it; False if nobody offers it within `patience_s` seconds.

    0 seconds are one look. Raises what `Taker.take` raises, `ConfigError` for a target that cannot
    be written, and what opening the planes raises. The file appears whole and checked, or not at
    all.
    """
    async with open_runtime(config, env, transports) as runtime:
        ends_at = trio.current_time() + patience_s
        while not (offers := await find_offers(runtime.control, wanted)):
            if trio.current_time() >= ends_at:
                return False
            await trio.sleep(_LOOK_S)
        exact = attrs.evolve(wanted, sha256=offers[0].sha256)
        _log.info(
            "%s is missing; taking %d MB of weights from peers, sha256 %s",
            target,
            offers[0].card.byte_count // 1_000_000,
            f"{exact.sha256} ({'pinned' if wanted.sha256 else 'as the peers say'})",
        )
        try:
            async with (
                open_partial(target, offers[0].sha256, trio.to_thread.run_sync) as partial,
                transports.open_transfers(_with_port(config, 0), env) as chain,
                open_transfer_router(
                    chain.planes,
                    metrics=TransferMetrics(runtime.metrics),
                    section=config.data_plane.transfer,
                ) as router,
            ):
                if partial is not None:
                    taker = Taker(
                        control=runtime.control,
                        client=runtime.client,
                        router=router,
                        config=config,
                        metrics=metrics,
                        who=who,
                        report=report,
                    )
                    await taker.take(exact, partial)
        except OSError as error:
            raise ConfigError(f"the model cannot be kept at {target}: {error}") from error
        return True


def _with_port(config: Config, port: int) -> Config:
    """With transfers at another port than those of KV blocks have."""
    transfer = msgspec.structs.replace(config.data_plane.transfer, port=port)
    data = msgspec.structs.replace(config.data_plane, transfer=transfer)
    return msgspec.structs.replace(config, data_plane=data)
