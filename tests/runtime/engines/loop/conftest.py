"""Both ways to ask the step loop."""

from __future__ import annotations

import pytest

from tests.runtime.engines.loop import hosting


@pytest.fixture(params=[hosting.pull, hosting.push])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same test by `generate` and by `forward`."""
    monkeypatch.setattr(hosting, "way", request.param)
