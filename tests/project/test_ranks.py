"""What tests/ranks.py says when a rank does not answer."""

import time

import pytest

from tests.ranks import RankError, RankPool


def wait_in_this_function(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(60)


def answer(rank: int, world: int) -> int:
    return rank


@pytest.mark.alone
def test_a_timeout_shows_the_stacks_of_the_ranks_that_did_not_answer():
    with RankPool(2) as pool:
        assert pool.run(answer) == [0, 1]  # the processes are up: the deadline below is that of the function alone
        with pytest.raises(RankError, match="1 of 2 ranks failed in wait_in_this_function") as failure:
            pool.run(wait_in_this_function, timeout=2)
        text = str(failure.value)
        assert "--- rank 1 of 2:\nno answer in time" in text
        assert "test_ranks.py" in text and "in wait_in_this_function" in text.split("its stacks:")[1]
        assert "rank 0 of 2" not in text
        assert pool.run(answer) == [0, 1]
