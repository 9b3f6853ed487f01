"""The hook that every prefill and decode option goes through."""

from __future__ import annotations

import pytest

from trinamo.runtime.disaggregation.options import DisaggregationOptions, normalize
from trinamo.runtime.errors import ConfigError


def test_mooncake_tcp_is_mooncake_forced_to_tcp_without_a_device() -> None:
    environ: dict[str, str] = {}
    found = normalize(
        DisaggregationOptions(transfer_backend="mooncake_tcp", rdma_device="mlx5_0"), environ
    )

    assert environ == {"MC_FORCE_TCP": "1"}
    assert (found.transfer_backend, found.rdma_device) == ("mooncake", None)


def test_what_the_operator_has_set_stays() -> None:
    environ = {"MC_FORCE_TCP": "0"}
    normalize(DisaggregationOptions(transfer_backend="mooncake_tcp"), environ)

    assert environ == {"MC_FORCE_TCP": "0"}


def test_the_alias_is_resolved_before_any_check_of_names() -> None:
    """So a rule about `mooncake` holds for it too."""
    found = normalize(
        DisaggregationOptions(
            mode="decode", transfer_backend="mooncake_tcp", decode_enable_radix_cache=True
        ),
        {},
    )

    assert found.decode_enable_radix_cache
    assert not found.disable_radix_cache


def test_other_backends_leave_the_environment_alone() -> None:
    environ: dict[str, str] = {}
    for backend in ("nixl", "mooncake", "tcp", "memory"):
        normalize(DisaggregationOptions(transfer_backend=backend), environ)

    assert environ == {}


def test_decode_without_a_radix_cache_switches_it_off() -> None:
    found = normalize(DisaggregationOptions(mode="decode", transfer_backend="tcp"), {})

    assert found.disable_radix_cache


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (
            DisaggregationOptions(
                mode="decode",
                transfer_backend="nixl",
                decode_enable_radix_cache=True,
                enable_hisparse=True,
            ),
            ("decode_enable_radix_cache", "enable_hisparse"),
        ),
        (
            DisaggregationOptions(
                mode="decode",
                transfer_backend="nixl",
                decode_enable_radix_cache=True,
                disable_radix_cache=True,
            ),
            ("decode_enable_radix_cache", "disable_radix_cache"),
        ),
        (
            DisaggregationOptions(
                mode="decode", transfer_backend="tcp", decode_enable_radix_cache=True
            ),
            ("decode_enable_radix_cache", "transfer_backend", "'tcp'"),
        ),
        (
            DisaggregationOptions(mode="prefill", decode_enable_radix_cache=True),
            ("decode_enable_radix_cache", "mode", "prefill"),
        ),
        (DisaggregationOptions(transfer_backend="rocket"), ("transfer_backend", "rocket")),
        (
            DisaggregationOptions(transfer_backend="tcp", rdma_device="mlx5_0"),
            ("rdma_device", "mlx5_0", "transfer_backend"),
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused_with_both_names(
    options: DisaggregationOptions, names: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        normalize(options, {})

    assert all(name in caught.value.message for name in names)
