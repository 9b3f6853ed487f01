"""An authority for pages that are served under TLS, and long time-outs for questions to processes."""

from __future__ import annotations

import pytest

from tests.certificates import Authority
from trinamo.runtime.view import looks, requests


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def patient_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every process that is asked a minute to answer, so that a stall makes none seem away."""
    monkeypatch.setattr(looks, "ASK_TIMEOUT_S", 60.0)
    monkeypatch.setattr(looks, "ETCD_TIMEOUT_S", 60.0)
    monkeypatch.setattr(requests, "ASK_TIMEOUT_S", 60.0)
