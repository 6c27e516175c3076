"""Fixtures for tests with several ranks: processes that live as long as the test session, started when first asked for.

Under pytest-xdist a worker is a session of its own, with its own ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests import turns
from tests.ranks import RankPool


def pytest_configure(config: pytest.Config) -> None:
    turns.register(config)


@pytest.fixture(scope="session", autouse=True)
def no_tables_of_the_user(tmp_path_factory) -> Iterator[None]:
    """Tables that the user's own runs of `tune` have left do not decide in tests, nor in the processes they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_TRITON_DIST_CACHE_DIR", str(tmp_path_factory.mktemp("tables")))
        yield


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    """Two ranks on the CPU."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    """Four ranks on the CPU."""
    with RankPool(4) as pool:
        yield pool


def _gpu_ranks(world: int) -> Iterator[RankPool]:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, {torch.cuda.device_count()} are here")
    with RankPool(world, device="cuda") as pool:
        yield pool


@pytest.fixture(scope="session")
def gpu_ranks2() -> Iterator[RankPool]:
    """Two ranks with one GPU each."""
    yield from _gpu_ranks(2)


@pytest.fixture(scope="session")
def gpu_ranks4() -> Iterator[RankPool]:
    """Four ranks with one GPU each."""
    yield from _gpu_ranks(4)


@pytest.fixture(scope="session")
def gpu_ranks8() -> Iterator[RankPool]:
    """Eight ranks with one GPU each."""
    yield from _gpu_ranks(8)
