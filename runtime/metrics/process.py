"""What `/metrics` says of the process itself: memory, processor time, descriptors, which build it is.

The `process_*` series are those that every Prometheus client library shows, read from `/proc` when
they are asked for. Of several frontends on one port each has its own page, so each shows its own.
"""

from __future__ import annotations

import platform
from importlib.metadata import version

from prometheus_client import Gauge
from prometheus_client.process_collector import ProcessCollector

from .metrics import Metrics


def show_process(metrics: Metrics, role: str) -> None:
    """Add them to the exposition of `metrics`; once per process, and not in a simulation."""
    ProcessCollector(registry=metrics.registry)
    build = Gauge(
        "trinamo_build_info",
        "1; what runs here",
        ("version", "python", "role"),
        registry=metrics.registry,
    )
    build.labels(version("trinamo"), platform.python_version(), role).set(1)
