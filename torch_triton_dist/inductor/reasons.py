"""Why a collective is left as it was: short fixed sentences, used as counter keys (`rejected: <reason>`) and shown by `explain`.

They hold no shapes or names; those are in `Decision.detail`. Each rests only on facts that all ranks see alike.
"""

from __future__ import annotations

# What the process or the user decided.
SWITCHED_OFF = "the pattern is switched off in torch_triton_dist.config"
CPP_WRAPPER = "C++ and FX wrappers cannot call the kernels"

# The collective itself.
NO_PATTERN = "no pattern for this collective"
ONE_RANK = "the group has one rank"
UNKNOWN_GROUP = "the group is not a constant of the graph"
IN_PLACE = "the collective works in place"
NOT_AWAITED = "the result is not awaited in this graph"
REDUCTION = "the reduction is neither sum nor avg"
DYNAMIC = "symbolic shapes"
EMPTY = "an empty tensor"
DTYPE = "the dtype is not float32, bfloat16 or float16"
LAYOUT = "a tensor of the collective is not contiguous"
MUTATION = "an in-place mutation lies between the collective and the matmul"

# The matmul next to it.
NO_MATMUL_READS = "no matmul reads it"
NOT_LEFT_OPERAND = "the matmul reads it as right operand or along the reduced dimension"
OTHER_OPERAND = "the other operand of the matmul depends on the gather"
OPERAND_LATE = "the other operand of the matmul is computed too late"
NOT_A_MATMUL = "the input is not the result of a matmul"
POINTWISE_BETWEEN = "a pointwise op lies between the matmul and the collective"
CAST_BETWEEN = "a cast lies between the matmul and the collective"
BATCHED = "the matmul is batched"
OTHER_MATMUL = "the matmul is neither mm nor addmm"
SCALED_BIAS = "addmm with beta or alpha other than 1"
BIAS_SHAPE = "the bias is neither a vector nor as large as the product"
MIXED_DTYPES = "the operands have different dtypes"
USED_ELSEWHERE = "the result of the matmul is used elsewhere too"
FUSED_ALREADY = "the matmul is fused with another collective already"

# The dimension.
GATHER_LAST_DIM = "the gather is along the last dimension"
SCATTER_LAST_DIM = "the scatter is along the last dimension"
UNEVEN = "the shards are of unequal size"
