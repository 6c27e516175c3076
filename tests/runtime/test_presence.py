"""A rank that dies before the first launch of a group, when no rank has a connection to it yet: the others hear of it at once."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import pytest
import torch.distributed as dist

from tests.ranks import Exited, RankPool, run_ranks
from tests.runtime.fake_kernel import launch
from tests.runtime.test_errors import error_of, world_name
from torch_triton_dist import config, runtime
from torch_triton_dist.runtime import groups, presence

QUICK = 10.0  # seconds, on a busy machine; it takes 0.1 s
DEADLINE = 40.0


def die(how: str) -> None:
    if how == "raise":
        sys.exit("an error in the user's code")  # what an exception that nobody catches comes to
    os.kill(os.getpid(), signal.SIGKILL)


def failed_launch(group: str, rank: int, deadline: float = DEADLINE) -> list:
    """What is wrong with the first launch of a group, and how long that took."""
    with config.patch(timeout_s=deadline):
        start = time.monotonic()
        error = error_of(launch, group, rank)
        return [str(error), error.reason, error.peer, error.kernel, time.monotonic() - start]


def dies_before_the_first_launch(rank: int, world: int, how: str, waiting: bool, members: list[int]) -> list | None:
    """The last rank dies: while the others wait for it, or before that. They launch on the group of `members`."""
    group = dist.new_group(members)
    presence.announce()
    dist.barrier()
    if rank == world - 1:
        time.sleep(1.0 if waiting else 0.0)
        die(how)
    if rank not in members:
        return None
    time.sleep(0.0 if waiting else 1.0)
    name = group.group_name
    return [failed_launch(name, rank), str(error_of(launch, name, rank)), str(error_of(runtime.reset, name))]


@pytest.mark.parametrize("waiting", [True, False], ids=["while the others wait", "before they come"])
@pytest.mark.parametrize(("how", "members"), [("SIGKILL", [0, 1, 2]), ("raise", [1, 2])], ids=["SIGKILL", "raise, two of three ranks"])
def test_a_rank_that_dies_before_the_first_launch(how, members, waiting):
    values = run_ranks(dies_before_the_first_launch, 3, how, waiting, members, expect_exit=(2,))
    assert values[2] == Exited({"raise": 1, "SIGKILL": -signal.SIGKILL}[how])
    reasons = []
    for (text, reason, peer, kernel, seconds), again, reset in (values[rank] for rank in members[:-1]):
        dead = members.index(2)
        assert re.search(rf"rank \d of group '\w+': rank {dead} has exited \(process \d+\) before the end of 'addresses'", text), text
        assert "which the first launch of matmul_all_reduce waits for" in text and "restart the job" in text
        assert reason == "aborted" or (reason, peer) == ("peer exited", dead)  # or another rank was quicker, and has posted it
        assert kernel == "matmul_all_reduce" and seconds < QUICK
        assert "cannot be used since an earlier error" in again and f"rank {dead} has exited" in again
        assert "restart the job" in reset
        reasons.append(reason)
    assert "peer exited" in reasons


def cannot_be_known_dead(rank: int, world: int, why: str) -> list | None:
    if rank == 1 and why == "another host":
        identity = groups.host_identity()
        groups.host_identity = lambda: f"another {identity}"
    if rank == 0 or why == "another host":
        presence.announce()
    dist.barrier()
    if rank == 1:
        die("SIGKILL")
    return failed_launch(world_name(), rank, deadline=1.5)


@pytest.mark.parametrize("why", ["another host", "nothing posted"])
def test_a_rank_of_which_nothing_is_known_has_the_deadline(why):
    text, reason, peer, kernel, seconds = run_ranks(cannot_be_known_dead, 2, why, expect_exit=(1,))[0]
    assert "rank(s) 1 did not reach 'addresses' within 1.5 s, which the first launch of matmul_all_reduce waits for" in text, text
    assert (reason, peer, kernel) == ("deadline", 1, "matmul_all_reduce") and 1.4 < seconds < QUICK


def stops_for_a_while(rank: int, world: int) -> list:
    """Rank 1 does nothing at all for two seconds: no thread of it runs, as when a compiler holds the interpreter's lock."""
    presence.announce()
    dist.barrier()
    if rank == 1:
        stopped = os.getpid()
        waker = os.fork()
        if waker == 0:
            time.sleep(2.0)
            os.kill(stopped, signal.SIGCONT)
            os._exit(0)
        os.kill(stopped, signal.SIGSTOP)
        os.waitpid(waker, 0)
    start = time.monotonic()
    return [launch(world_name(), rank), time.monotonic() - start]


def test_a_slow_rank_is_not_dead():
    (values, waited), (others, _) = run_ranks(stops_for_a_while, 2)
    assert values == others == [0, 1] and waited > 1.5


def leaves_a_child(rank: int, world: int) -> list | None:
    presence.announce()
    box = [0]
    if rank == 1:
        box = [os.fork()]
        if box == [0]:
            time.sleep(2 * DEADLINE)
            os._exit(0)
    dist.broadcast_object_list(box, src=1)
    if rank == 1:
        die("SIGKILL")
    try:
        return failed_launch(world_name(), rank)
    finally:
        os.kill(box[0], signal.SIGKILL)


def test_a_forked_child_does_not_pass_for_its_parent():
    text, reason, *_, seconds = run_ranks(leaves_a_child, 2, expect_exit=(1,))[0]
    assert "rank 1 has exited" in text and reason == "peer exited" and seconds < QUICK


def keeper_of_the_store_dies(rank: int, world: int, waiting: bool) -> list | None:
    """The process group is made anew, with a store that rank 0 keeps, as without torchrun."""
    presence.announce()  # for the first group; the second one is told again
    box = [0]
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        box = [store.port]
    dist.broadcast_object_list(box)
    if rank != 0:
        store = dist.TCPStore("127.0.0.1", box[0], is_master=False)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    presence.announce()
    dist.barrier()
    if rank == 0:
        time.sleep(1.0 if waiting else 0.0)
        die("SIGKILL")
    time.sleep(0.0 if waiting else 1.0)
    return failed_launch(world_name(), rank)


@pytest.mark.parametrize("waiting", [True, False], ids=["while the others wait", "before they come"])
def test_the_rank_that_keeps_the_store_dies(waiting):
    for text, reason, peer, kernel, seconds in run_ranks(keeper_of_the_store_dies, 3, waiting, expect_exit=(0,))[1:]:
        assert seconds < QUICK and "restart the job" in text, text
        if waiting:
            assert "the store of the group does not answer during 'addresses', which the first launch of matmul_all_reduce" in text, text
            assert "Rank 0 has exited (process " in text and (reason, peer, kernel) == ("peer exited", 0, "matmul_all_reduce")
        else:  # nobody has learned who is there
            assert "nobody keeps the store of the group" in text and "has exited: rank 0, unless" in text and reason == "set-up", text


def announced(rank: int, world: int, how: str) -> list[bool]:
    """Whether this rank has posted that it is there: before and after `how`."""
    import torch

    import torch_triton_dist as ttd

    def posted() -> bool:
        store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
        return store.check([f"torch_triton_dist/process/{rank}"])

    if how == "enable":
        before = posted()
        ttd.enable()
        return [before, posted()]
    ttd.enable()  # tells the first group; here it is about the one that is made later
    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world)
    before = posted()
    torch.compile(lambda x: x + 1)(torch.ones(4))
    return [before, posted()]


@pytest.mark.parametrize("how", ["enable", "compile"])
def test_a_process_says_that_it_is_there(how):
    with RankPool(1) as pool:
        assert pool.run(announced, how, timeout=120) == [[False, True]]
