"""OpenTelemetry: spans to a collector, over OTLP and HTTP."""

from .exporter import OtlpSpans, open_spans

__all__ = ["OtlpSpans", "open_spans"]
