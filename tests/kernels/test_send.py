"""What an all-gather sends and copies, on the CPU, with a context made by hand."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from torch_triton_dist import language as dl
from torch_triton_dist.backends import cpu
from torch_triton_dist.kernels.send import copy_group, send_rows
from torch_triton_dist.runtime import layout

cpu.ensure_registered()


@triton.jit
def send_kernel(A, CTX, R, K, limit):
    n = dl.launch_number(ctx=CTX)
    send_rows(limit, A, dl.heap(n, tl.float32, ctx=CTX), dl.flags(n, ctx=CTX), R, K, n, n << 16, 16, 1, 16, 256, 1, 1, CTX)


@pytest.mark.timeout(60, method="thread")  # it would hang in native code
@pytest.mark.parametrize("abort", [0, 1])
def test_sending_ends(abort):
    """Four chunks, all claimed once; none after the first if the group was told to give up, and the loop ends then, too."""
    context, heap = torch.zeros(64, dtype=torch.int64), torch.zeros(1 << 16, dtype=torch.int64)
    context[layout.WORLD] = context[layout.LAUNCH] = 1
    context[layout.HEAPS] = heap.data_ptr()
    context[layout.FLAGS_STRIDE], context[layout.DATA_START], context[layout.DATA_STRIDE] = 1024, 2048, 1 << 16
    context[layout.ABORT] = abort
    send_kernel[(1, 1, 1)](torch.ones(64, 16), context, 64, 16, 4)
    assert context[layout.SEND] == (4 if not abort else 2 * layout.NO_TILE)


@triton.jit
def copy_kernel(SOURCE, TARGET, R, K, group, STEP_K: tl.constexpr, GROUP_K: tl.constexpr):
    rows = tl.arange(0, 4)[:, None]
    copy_group(SOURCE + rows * K, TARGET + rows * K, rows < R, group, K, STEP_K, GROUP_K)


@pytest.mark.parametrize("step", [32, 64, 128, 256])
def test_a_group_is_copied_and_no_other(step):
    """Groups of 96 columns, also in steps that do not divide them; the last group has 58, and row 3 is not there."""
    source = torch.randn(4, 250)
    for group, columns in ((0, slice(0, 96)), (1, slice(96, 192)), (2, slice(192, 250))):
        target = torch.zeros(4, 250)
        copy_kernel[(1, 1, 1)](source, target, 3, 250, group, STEP_K=step, GROUP_K=96)
        expected = torch.zeros(4, 250)
        expected[:3, columns] = source[:3, columns]
        assert torch.equal(target, expected)
