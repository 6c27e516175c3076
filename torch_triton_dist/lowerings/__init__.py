"""Fused op -> Inductor IR: a template kernel for each op, its context, and the order between kernels of one group.

Import `torch_triton_dist.lowerings.register` to register the lowerings (it imports Inductor).
"""
