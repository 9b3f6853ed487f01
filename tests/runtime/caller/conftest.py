from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.runtime.endpoints import Cluster, open_cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with open_cluster() as cluster:
        yield cluster
