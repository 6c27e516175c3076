"""The protocols of the kernels, by their model (protocol_model.py): no interleaving races or hangs, and every rule is needed."""

from __future__ import annotations

import contextlib
import random

import pytest

from tests.kernels import protocol_model
from tests.kernels.protocol_model import (
    ADD_LAST,
    AHEAD,
    ALL_CAME,
    ALL_ENTERED,
    ALL_READ,
    BLANK_AFTER,
    BLANK_LAST,
    CLEAR_SENDS,
    CLOSE,
    COUNT_ANEW,
    COUNT_LAST,
    COUNTED,
    DATA_FIRST,
    HELP_FIRST,
    JOIN,
    KEEP_OUT,
    MEET,
    NO_BLANK,
    NO_SUM,
    PAY_BEFORE_LEAVE,
    PAY_BEFORE_WAIT,
    ROTATION,
    SEND_FIRST,
    TELL,
    TORN,
    WARN,
    Deadlock,
    Mismatch,
    Race,
    all_gather,
    all_gather_copied,
    all_gather_small,
    reduce_scatter,
    reduce_scatter_small,
    simulate,
    sliced,
    small,
    two_shot,
)

RESIDENT = [(1, 1), (3, 1), (3, 3)]  # programs, and how many run at a time
SEQUENCES = {
    "reduce_scatter": [reduce_scatter(1)] * 4,
    "reduce_scatter of two sizes": [reduce_scatter(2, s=2), reduce_scatter(1, size=3), reduce_scatter(3, s=2)] * 2,
    "reduce_scatter, staged": [reduce_scatter(3, staged=True), reduce_scatter(5, s=2, staged=True, size=2)] * 2,
    "reduce_scatter in rounds": [reduce_scatter(2, s=2), reduce_scatter(5, s=2)] * 2,
    "reduce_scatter in runs": [reduce_scatter(3, 3, runs=2), reduce_scatter(4, 4, staged=True, runs=2), reduce_scatter(5, 5, runs=1)] * 2,
    "reduce_scatter in parts": [reduce_scatter(3, 2, tail=1), reduce_scatter(4, 4, tail=3), reduce_scatter(3, staged=True, tail=1)] * 2,
    "two-shot all_reduce, a tile a rank": [two_shot(4)] * 4,
    "two-shot all_reduce, ragged": [two_shot(5), two_shot(9, s=2), two_shot(11, s=2)] * 2,
    "two-shot all_reduce, fewer tiles than ranks": [two_shot(1), two_shot(2)] * 2,
    "two-shot all_reduce, sums in blanks": [two_shot(4, size=2, blanks=True), two_shot(9, s=2, blanks=True), two_shot(4)] * 2,
    "small all_reduce": [small(3, 2), small(1)] * 2,
    "small all_reduce among others": [small(2, 4), reduce_scatter(3), small(3), two_shot(4), small(1, 3), all_gather(2, 3)],
    "sliced all_reduce": [sliced(3, 2), sliced(1)] * 2,
    "sliced all_reduce, fewer rows than ranks": [sliced(2, 2, rows=1), sliced(1, rows=3), small(2), sliced(3, rows=2)],
    "sliced all_reduce among others": [
        *(sliced(2), two_shot(4, blanks=True), sliced(3, 2), small(2), small(3, 2), sliced(1), reduce_scatter(2)),
    ],
    "two-shot then small": [two_shot(4), small(1)] * 2,
    "all_gather": [all_gather(2, 1)] * 4,
    "all_gather in chunks": [all_gather(2, 3), all_gather(1, 2, senders=2)] * 2,
    "all_gather, all programs send first": [all_gather(2, 2, senders=3)] * 4,
    "all_gather in groups": [all_gather(2, 2, groups=2), all_gather(1, 1, groups=4, senders=2)] * 2,
    "all_gather in groups and parts": [all_gather(2, 1, (2, 2, 2, 2), groups=2, whole=3), all_gather(1, 2, groups=2, whole=0)] * 2,
    "all_gather in groups, no columns on a rank": [all_gather(1, 2, (0, 1, 2, 1), gather=True, groups=2)] * 4,
    "all_gather, no columns on a rank": [all_gather(1, 2, (0, 1, 2, 1), gather=True)] * 4,
    "small all_gather": [all_gather_small(2, 2), all_gather_small(1, 1)] * 2,
    "small all_gather in parts": [all_gather_small(4, 2, (2, 2, 2, 2), parts=2), all_gather_small(2, 1, (3, 3, 3, 3), parts=2)] * 2,
    "small all_gather, no columns on a rank": [all_gather_small(2, 2, (0, 1, 2, 1), gather=True)] * 4,
    "small reduce_scatter": [reduce_scatter_small(2, 1), reduce_scatter_small(1, 3, size=2), reduce_scatter_small(1, 2, sums=3)] * 2,
    "all_gather, uneven columns": [all_gather(2, 2, (1, 3, 1, 2))] * 4,
    "copied all_gather": [all_gather_copied(3), all_gather_copied(2), all_gather_copied(1, (1, 3, 1, 2))] * 2,
    "copied all_gather, no columns on a rank": [all_gather_copied(3, (0, 1, 2, 1), gather=True)] * 4,
    "copied all_gather among others": [
        *(all_gather_copied(2), reduce_scatter(1), all_gather_copied(3, runs=2), reduce_scatter(2, tail=1), small(2), all_gather_copied(1)),
        *(sliced(2), all_gather_copied(2), all_gather(1, 2), all_gather_copied(2), two_shot(4), reduce_scatter(2)),
    ],
}


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", SEQUENCES)
def test_no_interleaving_races_or_hangs(name, world):
    kernels = SEQUENCES[name]
    for programs, resident in RESIDENT:
        for seed in range(3):
            for rank in simulate(seed, world, kernels, programs, resident):
                assert rank.launch == len(kernels) + 1 and rank.send == 0


def any_kernel(pick, world):
    tiles, s, size, gather = pick.randint(1, 6), pick.randint(1, 2), pick.randint(1, 2), pick.random() < 0.5
    columns = tuple(pick.randint(0, 2) for _ in range(world))
    return pick.choice(
        [
            reduce_scatter(tiles, tiles, size, staged=gather, runs=pick.randint(1, 3)),
            reduce_scatter(tiles, s, size, staged=gather, tail=pick.randint(0, tiles - (-(-tiles // s) - 1) * s)),
            small(tiles, size),
            sliced(tiles, size),
            sliced(tiles, size, pick.randint(1, world)),
            two_shot(max(tiles, world), 1, size),
            two_shot(max(tiles, world * s), s, size),
            two_shot(max(tiles, world * s), s, size, blanks=True),
            all_gather_small(2 * pick.randint(1, 2), pick.randint(1, 3), columns, pick.randint(1, 2), gather=0 in columns or gather),
            reduce_scatter_small(pick.randint(1, 2), pick.randint(1, 3), size, sums=s),
            all_gather(pick.randint(1, 3), pick.randint(1, 3), columns, gather=0 in columns or gather, senders=pick.randint(1, 3)),
            all_gather(tiles, size, columns, 0 in columns or gather, s, groups=2, whole=pick.choice([0, 2, 1 << 20])),
            all_gather_copied(pick.randint(1, 4), columns, gather=0 in columns or gather, runs=pick.randint(0, 3)),
        ]
    )


@pytest.mark.parametrize("world", [2, 3, 4])
def test_no_sequence_of_kernels_races_or_hangs(world):
    """What one kernel leaves in a half (flags, counts, slots of other sizes, blanks) does not disturb the next."""
    for seed in range(40):
        pick = random.Random(seed)
        kernels = [any_kernel(pick, world) for _ in range(6)]
        for rank in simulate(seed, world, kernels, *RESIDENT[seed % len(RESIDENT)]):
            assert rank.launch == len(kernels) + 1


# The rule that is left out, what then happens, and where: world, kernels, programs, how many run at a time.
BROKEN = [
    (ROTATION, Race, 2, [reduce_scatter(1)] * 4, 1, 1),
    (ROTATION, Race, 3, [reduce_scatter(2)] * 4, 2, 2),
    (ROTATION, Race, 2, [reduce_scatter(2, staged=True)] * 4, 1, 1),
    (ROTATION, Race, 2, [two_shot(2), reduce_scatter(3)] * 2, 2, 2),  # two-shot alone has everybody's sums before it ends
    (ROTATION, Race, 2, [all_gather(1, 2)] * 4, 1, 1),
    (ROTATION, Race, 2, [small(1)] * 2, 1, 1),
    (ROTATION, Race, 2, [sliced(1), small(2)], 1, 1),  # sliced alone: as two-shot
    (ROTATION, Race, 3, [small(2), sliced(1)], 2, 2),
    (SEND_FIRST, Deadlock, 2, [small(1)], 1, 1),
    (SEND_FIRST, Deadlock, 2, [sliced(1)], 3, 1),
    (ALL_CAME, Race, 2, [small(1)], 1, 1),
    (ALL_CAME, Race, 2, [small(1, 2)], 1, 1),
    (ALL_CAME, Race, 2, [sliced(1)], 1, 1),
    (ALL_CAME, Race, 3, [sliced(2)], 2, 2),
    (BLANK_LAST, Deadlock, 2, [small(1)], 1, 1),
    (BLANK_LAST, Deadlock, 2, [sliced(1)], 1, 1),
    (BLANK_AFTER, Race, 2, [small(1)], 1, 1),
    (BLANK_AFTER, Race, 2, [small(1), reduce_scatter(1), small(1), reduce_scatter(1)], 1, 1),
    (BLANK_AFTER, Race, 2, [sliced(1)], 1, 1),
    (ALL_READ, Race, 2, [small(1)], 1, 1),
    (ALL_READ, Race, 2, [sliced(1)], 1, 1),
    (NO_BLANK, Deadlock, 2, [small(1, 2)], 1, 1),
    (NO_BLANK, Deadlock, 2, [sliced(1)], 1, 1),
    (MEET, Race, 2, [[small(1, op="sum")], [small(1, op="avg")]], 1, 1),
    (MEET, Race, 3, [[small(1, op="sum")], [small(1, op="sum")], [small(1, op="avg")]], 2, 2),
    (MEET, Race, 2, [[sliced(1, op="sum")], [sliced(1, op="avg")]], 1, 1),
    (AHEAD, Deadlock, 2, [small(1)] * 2, 3, 3),
    (AHEAD, Deadlock, 2, [small(1), sliced(1)], 1, 1),
    (TELL, Deadlock, 2, [small(1)], 1, 1),
    (TELL, Deadlock, 2, [sliced(1)], 3, 1),
    (DATA_FIRST, Race, 2, [reduce_scatter(1)], 1, 1),
    (DATA_FIRST, Race, 2, [reduce_scatter(2, staged=True)], 1, 1),
    (DATA_FIRST, Race, 2, [two_shot(2)], 1, 1),
    (ALL_CAME, Race, 2, [two_shot(2, size=2, blanks=True)], 1, 1),
    (BLANK_LAST, Deadlock, 2, [two_shot(2, size=2, blanks=True)], 1, 1),
    (BLANK_AFTER, Race, 2, [two_shot(2, blanks=True)], 1, 1),
    (ALL_READ, Race, 2, [two_shot(2, blanks=True)], 1, 1),
    (NO_BLANK, Deadlock, 2, [two_shot(2, blanks=True)], 1, 1),
    (ROTATION, Race, 2, [two_shot(2, blanks=True), reduce_scatter(3)] * 2, 2, 2),
    (DATA_FIRST, Race, 2, [all_gather(1, 1)], 1, 1),
    (COUNT_LAST, Race, 2, [all_gather(1, 3)], 2, 2),
    (COUNTED, Race, 2, [all_gather(1, 3)], 2, 2),
    (COUNT_ANEW, Deadlock, 2, [all_gather(1, 3)] * 3, 1, 1),  # a count of the launch before the last
    (COUNT_ANEW, Deadlock, 2, [reduce_scatter(4), reduce_scatter(1), all_gather(1, 2)], 1, 1),  # a stamp in its place
    (ROTATION, Race, 2, [all_gather_small(2, 2)] * 4, 1, 1),
    (ROTATION, Race, 2, [reduce_scatter_small(1, 1)] * 4, 1, 1),
    (DATA_FIRST, Race, 2, [all_gather_small(1, 1)], 1, 1),
    (BLANK_AFTER, Race, 2, [reduce_scatter_small(1, 1)] * 4, 1, 1),
    (ALL_READ, Race, 2, [reduce_scatter_small(2, 1)] * 4, 1, 1),
    (COUNT_LAST, Race, 2, [all_gather_small(1, 3)], 2, 2),
    (COUNTED, Race, 2, [all_gather_small(1, 3)], 2, 2),
    (COUNT_ANEW, Deadlock, 2, [all_gather_small(1, 3)] * 3, 1, 1),
    (ADD_LAST, Race, 2, [all_gather_small(2, 1, parts=2)], 2, 2),
    (HELP_FIRST, Deadlock, 2, [all_gather_small(1, 1)], 2, 1),
    (SEND_FIRST, Deadlock, 2, [reduce_scatter_small(1, 1)], 3, 1),
    (PAY_BEFORE_WAIT, Deadlock, 2, [reduce_scatter(1)], 1, 1),
    (PAY_BEFORE_WAIT, Deadlock, 4, [reduce_scatter(2, s=2)], 1, 1),
    (PAY_BEFORE_WAIT, Deadlock, 2, [two_shot(2)], 1, 1),
    (PAY_BEFORE_WAIT, Deadlock, 2, [two_shot(2, blanks=True)], 1, 1),
    (PAY_BEFORE_LEAVE, Deadlock, 2, [reduce_scatter(1)], 3, 3),
    (PAY_BEFORE_LEAVE, Deadlock, 2, [reduce_scatter(2, staged=True)], 3, 3),
    (PAY_BEFORE_LEAVE, Deadlock, 2, [two_shot(2)], 3, 3),
    (SEND_FIRST, Deadlock, 2, [reduce_scatter(1)], 3, 1),
    (SEND_FIRST, Deadlock, 2, [two_shot(2)], 3, 1),
    (HELP_FIRST, Deadlock, 2, [all_gather(1, 1)], 2, 1),
    (HELP_FIRST, Deadlock, 4, [all_gather(2, 2)], 3, 2),
    (HELP_FIRST, Deadlock, 2, [all_gather(1, 1, groups=2, senders=0)], 1, 1),
    (HELP_FIRST, Deadlock, 2, [all_gather(1, 1, groups=2, senders=0, whole=0)], 1, 1),
    (DATA_FIRST, Race, 2, [all_gather(1, 1, groups=2)], 1, 1),
    (ADD_LAST, Race, 2, [all_gather(1, 1, groups=2, whole=0)], 2, 2),
    (ADD_LAST, Race, 2, [reduce_scatter(1, tail=1)], 2, 2),
    (ROTATION, Race, 2, [all_gather(1, 2, groups=2)] * 4, 1, 1),
    (CLEAR_SENDS, Deadlock, 2, [all_gather(1, 1)] * 2, 1, 1),
    (TELL, Deadlock, 2, [[reduce_scatter(1)], [all_gather(1, 1, (1, 0))]], 1, 1),
    (TELL, Deadlock, 2, [all_gather_copied(1)], 1, 1),
    (ALL_ENTERED, Race, 2, [all_gather_copied(1)] * 2, 1, 1),
    (ALL_ENTERED, Race, 4, [all_gather_copied(3), reduce_scatter(1), all_gather_copied(2), all_gather_copied(2)], 3, 3),
    (DATA_FIRST, Race, 2, [all_gather_copied(1)], 1, 1),
    (JOIN, Race, 2, [all_gather_copied(2)] * 2, 1, 1),
    (JOIN, Race, 3, [all_gather_copied(2), small(1)], 3, 3),  # what it follows has written the shard anew
]


@pytest.mark.parametrize(("rule", "error", "world", "kernels", "programs", "resident"), BROKEN)
def test_the_model_needs_every_rule(rule, error, world, kernels, programs, resident):
    found = set()
    for seed in range(300):
        try:
            simulate(seed, world, kernels, programs, resident, without=rule)
        except (Race, Deadlock, Mismatch) as failure:
            found.add(type(failure))
            if error in found:
                break
    assert error in found
    matching = not isinstance(kernels[0], list)
    for seed in range(20):
        with contextlib.nullcontext() if matching else pytest.raises(Mismatch):
            simulate(seed, world, kernels, programs, resident)


# Not two-shot, also in slices: who has ended a launch has everybody's sums, so that all have read their slots.
@pytest.mark.parametrize(
    "kernel",
    [reduce_scatter(1), reduce_scatter(2, staged=True), small(1), all_gather(1, 2), all_gather_small(1, 2), reduce_scatter_small(1, 1)],
)
def test_launches_behind_one_that_gave_up_disturb_nobody(kernel):
    """Rank 2 has ended after launch 1, so rank 0 is told to give up in launch 2, and launch 3 is queued there. Rank 1 may still be in
    launch 1, for which it has or gets all that it needs, and which uses the half that launch 3 would write into."""
    raced = []
    for seed in range(400):
        by_rank = [[kernel] * 3, [kernel], [kernel]]
        simulate(seed, 3, by_rank, 2, 2, told=[(0, 2)])
        try:
            simulate(seed, 3, by_rank, 2, 2, without=KEEP_OUT, told=[(0, 2)])
        except Race as race:
            raced.append(race)
    assert raced


@pytest.mark.parametrize("kernel", [small(1), small(2, 2), sliced(1)])
def test_launches_behind_one_that_gave_up_at_its_end_send_nothing(kernel):
    """Rank 0 is told when its programs have left launch 1, which has cleared the counters for launch 2. It ends launch 1 without a result,
    so launch 2 has nothing to send. Rank 1 would take it (it is told, too, but perhaps later: the model leaves that out)."""
    raced = 0
    for seed in range(100):
        with contextlib.suppress(Deadlock):
            simulate(seed, 2, [kernel] * 2, 2, 2, told=[(0, 2)])
        try:
            with contextlib.suppress(Deadlock):
                simulate(seed, 2, [kernel] * 2, 2, 2, without=CLOSE, told=[(0, 2)])
        except Race:
            raced += 1
    assert raced


@pytest.mark.parametrize("behind", [all_gather_copied(2), small(1)])
def test_copies_of_a_rank_that_gave_up_spoil_no_result(behind):
    """The same, but copies do not look at what their rank is told: those of launch 2 overwrite rows that rank 1 still reads in launch 1. So
    rank 1 has to throw its result away. It does, too, whichever rank is told first, and in whichever launch."""
    copied = all_gather_copied(2)
    by_rank, raced = [[copied, copied, behind], [copied], [copied]], 0
    for seed in range(100):
        simulate(seed, 3, by_rank, 2, 2, told=[(0, 2)])
        try:
            simulate(seed, 3, by_rank, 2, 2, without=WARN, told=[(0, 2)])
        except Race:
            raced += 1
    assert raced
    for launch in (1, 2, 3):
        for seed in range(20):
            simulate(seed, 3, [copied, copied, behind, copied], 1, 1, told=[(seed % 3, launch)])


def test_what_was_not_summed_is_not_sent():
    """Rank 0 gives up in its first wait, unless the product of rank 1 has come: rank 1 gets no sum from it (and is told, which the model
    leaves out)."""
    raced = 0
    for seed in range(50):
        with contextlib.suppress(Deadlock):
            simulate(seed, 2, [sliced(1)], 1, 1, told=[(0, 1)])
        try:
            with contextlib.suppress(Deadlock):
                simulate(seed, 2, [sliced(1)], 1, 1, without=NO_SUM, told=[(0, 1)])
        except Race:
            raced += 1
    assert raced


def test_every_rule_is_tested():
    rules = {value for name, value in vars(protocol_model).items() if name.isupper() and isinstance(value, str)} - {TORN}
    assert {rule for rule, *_ in BROKEN} | {KEEP_OUT, CLOSE, NO_SUM, WARN} == rules


def test_the_model_needs_a_wait_for_every_peer():
    """A rank without columns that keeps no gathered rows waits for nobody, and overruns its peers: why `keeps_gathered` says yes."""
    kernels = [all_gather(1, 1, (0, 1, 1))] * 4
    found = []
    for seed in range(300):
        try:
            simulate(seed, 3, kernels, 2, 2)
        except Race as race:
            found.append(race)
            break
    assert found


@pytest.mark.parametrize(
    "first",
    [
        reduce_scatter(2),
        small(2),
        two_shot(2),
        two_shot(2, blanks=True),
        sliced(2),
        sliced(2, rows=1),
        all_gather(1, 2),
        all_gather_small(2, 2),
        all_gather_copied(2),
    ],
)
@pytest.mark.parametrize(
    "second",
    [
        *(reduce_scatter(2, size=2), small(3), small(2, 2), small(2, op="avg"), two_shot(3), sliced(3), sliced(2, op="avg")),
        *(all_gather(2, 2), all_gather(1, 1, (0, 0)), all_gather_copied(3)),
    ],
)
def test_ranks_that_run_different_kernels_always_hear_of_it(first, second):
    """Neither a hang nor a wrong result: some rank finds the other stamp. After launches that match, too."""
    for before in ([], [small(1), reduce_scatter(2)]):
        for seed in range(8):
            for programs, resident in RESIDENT:
                with pytest.raises(Mismatch):
                    simulate(seed, 2, [[*before, first], [*before, second]], programs, resident)
