"""Under which subjects an endpoint's instances publish numbered events, and answer for snapshots."""

from __future__ import annotations

from ..protocol.discovery.instances import EndpointName


def topic_of(kind: str, endpoint: EndpointName) -> str:
    """The topic under which an endpoint's instances publish events of `kind`."""
    # A name may contain dots, which separate tokens in a subject.
    parts = (endpoint.namespace, endpoint.component, endpoint.endpoint)
    return f"trinamo.{kind}." + ".".join(part.replace(".", "%2E") for part in parts)


def event_subject(topic: str, publisher: str) -> str:
    return f"{topic}.event.{publisher}"


def snapshot_subject(topic: str, publisher: str) -> str:
    return f"{topic}.snapshot.{publisher}"
