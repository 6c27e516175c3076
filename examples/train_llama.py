"""A small Llama-style model, trained with tensor and sequence parallelism. Run it with

    torchrun --standalone --nproc-per-node 4 examples/train_llama.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel as Col
from torch.distributed.tensor.parallel import PrepareModuleInput, SequenceParallel, parallelize_module
from torch.distributed.tensor.parallel import RowwiseParallel as Row

import torch_triton_dist as ttd

VOCAB, DIM, LAYERS, HEADS, KV_HEADS, HIDDEN, BATCH, SEQ, STEPS = 256, 256, 2, 8, 4, 768, 4, 128, 20
D = DIM // HEADS


def linear(inputs, outputs):
    return torch.nn.Linear(inputs, outputs, bias=False)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wo = linear(DIM, DIM), linear(DIM, DIM)
        self.wk, self.wv = linear(DIM, KV_HEADS * D), linear(DIM, KV_HEADS * D)

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, D)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        angle = torch.outer(torch.arange(SEQ, device=x.device), 10000 ** (-torch.arange(0, D, 2, device=x.device) / D))
        q, k = (
            torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)
            for a, b in (q.chunk(2, -1), k.chunk(2, -1))
        )
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2))


class FeedForward(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3, self.w2 = linear(DIM, HIDDEN), linear(DIM, HIDDEN), linear(HIDDEN, DIM)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Residual(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.norm, self.inner = torch.nn.RMSNorm(DIM), inner

    def forward(self, x):
        return x + self.inner(self.norm(x))


local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.device_count() > 1 else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
mesh = init_device_mesh(device.type, (dist.get_world_size(),))

torch.manual_seed(0)
blocks = [Residual(part()) for _ in range(LAYERS) for part in (Attention, FeedForward)]
model = torch.nn.Sequential(torch.nn.Embedding(VOCAB, DIM), *blocks, torch.nn.RMSNorm(DIM), linear(DIM, VOCAB)).to(device)
shard = Shard(1)  # between the blocks, activations [batch, seq, dim] are sharded along the sequence
ends = {
    "0": Row(input_layouts=Replicate(), output_layouts=shard),
    str(len(model) - 2): SequenceParallel(),
    str(len(model) - 1): Col(input_layouts=shard, output_layouts=Replicate()),
}
parallelize_module(model, mesh, ends)
gather = PrepareModuleInput(input_layouts=(shard,), desired_input_layouts=(Replicate(),))
columns = {f"inner.{name}": Col() for name in ("wq", "wk", "wv", "w1", "w3")}
rows = {f"inner.{name}": Row(output_layouts=shard) for name in ("wo", "w2")}
for block in blocks:
    plan = {"norm": SequenceParallel(), "inner": gather, **columns, **rows}
    parallelize_module(block, mesh, {name: style for name, style in plan.items() if name in dict(block.named_modules())})

ttd.enable()  # the one line that this package asks for
compiled = torch.compile(model, backend="inductor")

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
cycle = torch.randperm(VOCAB, device=device)  # the text to learn: the vocabulary, round and round
for step in range(STEPS):
    start = torch.randint(VOCAB, (BATCH, 1), device=device)
    text = cycle[(start + torch.arange(SEQ + 1, device=device)) % VOCAB]
    loss = F.cross_entropy(compiled(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if local_rank == 0:
        print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
if local_rank == 0:
    print(dict(torch._dynamo.utils.counters["torch_triton_dist"]))
dist.destroy_process_group()
