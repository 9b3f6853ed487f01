"""Figures of the live table."""

from __future__ import annotations

import os

from trinamo.cli.up.watching import read_usage, sum_samples
from trinamo.runtime.view.facts import Rates


def test_samples_are_summed_over_their_labels() -> None:
    text = (
        b"# HELP trinamo_requests_total Requests\n"
        b'trinamo_requests_total{model="a b",outcome="success"} 2.0\n'
        b'trinamo_requests_total{model="}",outcome="x"} 3.0\n'
        b"trinamo_up 1\n"
        b"trinamo_odd what\n"
    )

    assert sum_samples(text) == {"trinamo_requests_total": 5.0, "trinamo_up": 1.0}


def test_a_rate_is_the_growth_per_second() -> None:
    rates = Rates()

    assert rates.update("x", 10, 1.0) == 0
    assert rates.update("x", 14, 3.0) == 2


def test_a_counter_that_began_again_counts_from_zero() -> None:
    rates = Rates()
    rates.update("x", 100, 1.0)

    assert rates.update("x", 6, 3.0) == 3


def test_this_process_uses_memory_and_time() -> None:
    usage = read_usage(os.getpid())

    assert usage is not None
    assert usage.rss_bytes > 1 << 20
    assert usage.cpu_s > 0


def test_a_process_that_is_not_there_has_no_usage() -> None:
    assert read_usage(2**22 + 1) is None
