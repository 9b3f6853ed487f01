"""The one hook that normalises and validates the options of split prefill and decode.

It runs once, before anything looks at a backend's name: `mooncake_tcp` is another word for
`mooncake` forced to TCP, and nothing after this hook knows the word. Errors name both options that
do not go together.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Final, Literal

import attrs

from ..errors import ConfigError

__all__ = ["TRANSFER_BACKENDS", "DisaggregationOptions", "normalize"]

_log = logging.getLogger("trinamo.disaggregation")
TRANSFER_BACKENDS: Final = ("nixl", "mooncake", "mooncake_tcp", "tcp", "memory")
_RADIX_BACKENDS: Final = ("nixl", "mooncake")
_FORCE_TCP: Final = "MC_FORCE_TCP"
Mode = Literal["none", "prefill", "decode"]


@attrs.frozen(kw_only=True)
class DisaggregationOptions:
    """What one worker was told about its part."""

    mode: Mode = "none"
    transfer_backend: str = "tcp"
    """One of `TRANSFER_BACKENDS`; after `normalize` never `mooncake_tcp`."""
    rdma_device: str | None = None
    decode_enable_radix_cache: bool = False
    """Keep prefixes on a decode worker, so that only what is missing is transferred."""
    disable_radix_cache: bool = False
    enable_hisparse: bool = False
    """Keep part of a sequence's KV out of the pool; its blocks cannot be shared by prefix."""


def normalize(
    options: DisaggregationOptions, environ: MutableMapping[str, str]
) -> DisaggregationOptions:
    """The options as the rest of trinamo takes them; `ConfigError` for what does not go together.

    For `mooncake_tcp` it sets `MC_FORCE_TCP` in `environ` (give `os.environ`) unless it is set, so
    call it before Mooncake is loaded and before children are started.
    """
    options = _resolve_alias(options, environ)
    if options.transfer_backend not in TRANSFER_BACKENDS:
        raise ConfigError(
            f"transfer_backend: {options.transfer_backend!r} is none of "
            f"{', '.join(TRANSFER_BACKENDS)}"
        )
    if options.rdma_device is not None and options.transfer_backend not in _RADIX_BACKENDS:
        raise ConfigError(
            f"rdma_device {options.rdma_device!r} is of no use with "
            f"transfer_backend {options.transfer_backend!r}; leave one of them out"
        )
    if options.mode == "decode":
        return _for_decode(options)
    if options.decode_enable_radix_cache:
        raise ConfigError(
            f"decode_enable_radix_cache is for mode 'decode', and mode is {options.mode!r}"
        )
    return options


def _resolve_alias(
    options: DisaggregationOptions, environ: MutableMapping[str, str]
) -> DisaggregationOptions:
    if options.transfer_backend != "mooncake_tcp":
        return options
    forced = environ.setdefault(_FORCE_TCP, "1")
    if forced != "1":
        # Mooncake asks only whether the variable is there, so TCP it will be all the same.
        _log.warning("%s=%s forces TCP as well; set it to 1 or leave it out", _FORCE_TCP, forced)
    _log.info("transfer backend mooncake_tcp: mooncake with %s=%s, no RDMA", _FORCE_TCP, forced)
    return attrs.evolve(options, transfer_backend="mooncake", rdma_device=None)


def _for_decode(options: DisaggregationOptions) -> DisaggregationOptions:
    if not options.decode_enable_radix_cache:
        return attrs.evolve(options, disable_radix_cache=True)
    if options.enable_hisparse:
        raise ConfigError("decode_enable_radix_cache is incompatible with enable_hisparse")
    if options.disable_radix_cache:
        raise ConfigError("decode_enable_radix_cache is incompatible with disable_radix_cache")
    if options.transfer_backend not in _RADIX_BACKENDS:
        raise ConfigError(
            "decode_enable_radix_cache requires transfer_backend in "
            f"{_RADIX_BACKENDS}, but got {options.transfer_backend!r}"
        )
    return options
