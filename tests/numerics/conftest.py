"""The tests of this folder run on two and on four ranks."""

from __future__ import annotations

import pytest

from tests.ranks import RankPool


@pytest.fixture(params=[2, 4], ids=["2ranks", "4ranks"])
def ranks(request) -> RankPool:
    """Each test that asks for it runs on two ranks, and on four."""
    return request.getfixturevalue(f"ranks{request.param}")
