"""The precision recipes, one row each, and PRECISIONS, which they make.

Two libraries quantise: torchao (TorchTitan, plain torch) and Transformer Engine (the Megatron
family). Moves are bytes read and written per element of an operand, counted kernel by kernel.
Sources, by file: torchao 0.18 float8/{float8_linear, float8_ops, float8_training_tensor,
float8_utils, fsdp_utils, float8_linear_utils, float8_tensor_parallel}.py,
prototype/moe_training/{mxfp8_linear, nvfp4_training/nvfp4_linear}.py,
prototype/blockwise_fp8_training/linear.py; torchtitan 0.1.0, 0.2.2 and 0.3.0
components/quantization and models/llama3/infra/parallelize.py; Transformer Engine
docs/features/low_precision_training.
"""

import math
from dataclasses import replace

from planner.precision.base import NOTHING, Operands, Precision, Recipe
from planner.registry import Registry

# Bytes of scale per element: 1 per 32, fp32 per 128, 1 per 16 (besides one fp32 per tensor).
MX, BLOCK, NV = 1.0 / 32, 4.0 / 128, 1.0 / 16
FP4, MX4 = 0.5 + NV, 0.5 + MX
# A GEMM reads scales in an order of its own, so they are written once, then read and written again
# (`to_blocked`, swizzle).
MX_SCALE = 3 * MX
# On a B200, Triton's cast along columns reaches 3.9 TB/s and the cast along rows 5.5 (torchao
# mx_formats README).
MX_COLUMNS = 3.0 * 5.5 / 3.9
# Eager amax: abs (2 + 2), max (2).
# Eager cast: to fp32 (2 + 4), times scale (8), clamp (8), to fp8 (4 + 1); a transposed copy 2 more.
EAGER_AMAX, EAGER_CAST, COPY = 6.0, 27.0, 2.0
# torchao's MXTensor.to_mx in eager torch operations: abs, amax, exponent, division in fp32, clamp,
# cast; judgement from its source.
EAGER_MX = 25.0
# A copy in 16 bits. Source: Megatron-LM core/transformer/moe/experts.py (Fp8Padding, Fp8Unpadding).
PADDING = 4.0
# Rows of each expert are padded to (`group_multiple`), from the sources:
# torchtitan components/quantization/__init__.py (FP8_GROUP_ALIGNMENT_SIZE, MXFP8_...): 16 bytes of
# fp8, and a block of mxfp8, as the weight's gradient sums over rows; torchao's blocks of 128.
# Transformer Engine pytorch/quantization.py get_align_size_for_quantization, and Megatron-LM
# core/fp8_utils.py get_fp8_align_size, core/fp4_utils.py get_fp4_align_size.
FP8_ROWS, MX_ROWS, BLOCK_ROWS, NV_ROWS = 16, 32, 128, 128

_BF16 = Recipe(name="bf16", peak="bf16", gain_key="gemm_bf16", experts="")
_FP16 = Recipe(name="fp16", peak="fp16", gain_key="gemm_bf16", experts="")

_TENSORWISE = Recipe(
    name="float8-tensorwise", peak="fp8", gain_key="gemm_fp8", experts="float8-rowwise",
    scale=Operands(2, 2, 2), cast=Operands(3, 3, 4, 3, 3),
    # Inductor fuses a reduction with the pointwise kernel before it (torchao's own count of bytes,
    # testing/training/roofline_utils.py, fuse_with_prev).
    scale_fuses=2,
    eager_scale=Operands(EAGER_AMAX, EAGER_AMAX, 2 * EAGER_AMAX, EAGER_AMAX, EAGER_AMAX),
    eager_cast=Operands(EAGER_CAST, EAGER_CAST, 2 * EAGER_CAST + COPY, EAGER_CAST + COPY,
        EAGER_CAST + COPY),
    fused_kernels=2, eager_kernels=10, column_amax=Operands(weight=1, gradient=1),
    row_amax=Operands(input=1, weight=1),
    step_amax=1, wire_bytes=1, multiple=16, rows_multiple=16, group_multiple=FP8_ROWS,
    fallback_multiple=16,
    small=((4096, 1024),),
)  # fmt: skip
# The backward multiplies with fast accumulation off, where torch's rowwise kernel is so slow that
# torchao calls cuBLAS's tensorwise one and scales its result (float8_ops.py addmm_float8_unwrapped;
# compiled still a kernel of its own, torchao issue 2184). Eager, the fp32 products of the scales
# are written and read besides.
_ROWWISE = replace(
    _TENSORWISE, name="float8-rowwise", gain_key="gemm_fp8_rowwise", scale=Operands(2, 2, 4, 2, 2),
    cast=Operands(3, 3, 6, 3, 3),
    column_amax=Operands(gradient=1, weight_again=1), row_amax=Operands(input=1, weight=1),
    step_amax=0, wire_bytes=2, gradients_as="float8-tensorwise", rescaled=4, eager_rescaled=12,
    small=((math.inf, 2048), (1024, math.inf), (2048, 4096)),
)  # fmt: skip
# A weight is scaled per tensor for the gradient of its input. The weight's gradient is a 16-bit
# product. Torchao's filter for small layers refuses the recipe (float8/config.py
# ROWWISE_WITH_GW_HP, float8_linear_utils.py _auto_filter_for_recipe).
_ROWWISE_GW_HP = replace(
    _ROWWISE, name="float8-rowwise-gw-hp", weight_grad=False, scale=Operands(2, 2, 2, 2),
    cast=Operands(3, 3, 3, 3),
    eager_scale=Operands(EAGER_AMAX, EAGER_AMAX, EAGER_AMAX, EAGER_AMAX),
    eager_cast=Operands(EAGER_CAST, EAGER_CAST, EAGER_CAST, EAGER_CAST + COPY), small=(),
)  # fmt: skip
_DELAYED = Recipe(
    name="float8-delayed", peak="fp8", gain_key="gemm_fp8", experts="float8-delayed",
    # No pass for scales. Half of the inputs come from LayerNormLinear, whose norm writes fp8.
    cast=Operands(input=2, weight=3, gradient=3), transposed=Operands(1, 1, 1), fused_kernels=1,
    weight_once=True,
    padding=PADDING, step_amax=2, saved_bytes=1, weight_copy_bytes=1, weight_copies=2, wire_bytes=1,
    tp_wire_bytes=1, tp_gradient_wire_bytes=1, multiple=16, rows_multiple=8,
    group_multiple=FP8_ROWS,
)  # fmt: skip
_BLOCKWISE = Recipe(
    name="float8-blockwise", peak="fp8", gain_key="gemm_fp8_blockwise", experts="float8-blockwise",
    scale=Operands(BLOCK, BLOCK, 2 * BLOCK, BLOCK, BLOCK), cast=Operands(3, 3, 6, 3, 3),
    eager_scale=Operands(BLOCK, BLOCK, 2 * BLOCK, BLOCK, BLOCK), eager_cast=Operands(3, 3, 6, 3, 3),
    fused_kernels=1, eager_kernels=1,
    multiple=128, rows_multiple=128, group_multiple=BLOCK_ROWS,
)  # fmt: skip
_MXFP8 = Recipe(
    name="mxfp8", peak="fp8", gain_key="gemm_mxfp8", experts="mxfp8",
    scale=Operands(MX_SCALE, MX_SCALE, 2 * MX_SCALE, MX_SCALE, MX_SCALE),
    cast=Operands(3, 3, 3 + MX_COLUMNS, MX_COLUMNS, MX_COLUMNS),
    eager_scale=Operands(MX_SCALE, MX_SCALE, 2 * MX_SCALE, MX_SCALE, MX_SCALE),
    eager_cast=Operands(EAGER_MX, EAGER_MX, EAGER_MX + MX_COLUMNS, MX_COLUMNS, MX_COLUMNS),
    fused_kernels=2, eager_kernels=8, multiple=32, rows_multiple=32, group_multiple=MX_ROWS,
    fallback_multiple=16,
)  # fmt: skip
_NVFP4 = Recipe(
    name="nvfp4", peak="fp4", gain_key="gemm_fp4", experts="", bf16_layers=0.15,
    dense_only=True,
    # The amax of the rotated tensor, then both orientations in one kernel. Only the weight's amax
    # runs in torch.
    scale=Operands(2, 2, 2), cast=Operands(2 + 2 * FP4, 2 + 2 * FP4, 2 + 2 * FP4),
    eager_scale=Operands(2, 18, 2), eager_cast=Operands(2 + 2 * FP4, 2 + 2 * FP4, 2 + 2 * FP4),
    fused_kernels=2, eager_kernels=3,
    saved_bytes=FP4, saved_weight_bytes=FP4, multiple=128, rows_multiple=128,
    # torch/nn/functional.py scaled_mm calls _scaled_mm_v2; torch/_functorch/partitioners.py
    # get_default_op_list has only _scaled_mm
    listed=False,
)  # fmt: skip

# Transformer Engine casts an input once in both orientations, saves the one that backward needs,
# and gathers quantised tensors.
# Experts' rows are cast expert by expert, by four kernels each (pytorch/csrc/extensions/cast.cpp,
# split_quantize, which joins delayed scaling's and blocks'); a launch from C++ takes a tenth of
# one from Python: judgement.
_TE_TENSORWISE = replace(
    _DELAYED, name="float8-tensorwise", experts="float8-tensorwise", scale=Operands(2, 2, 2),
    cast=Operands(3, 3, 3), fused_kernels=2, expert_launches=4 / 10,
    column_amax=Operands(input=1), row_amax=Operands(gradient=1), step_amax=1,
)  # fmt: skip
_TE_BLOCKS = replace(_DELAYED, transposed=NOTHING, step_amax=0, cast=Operands(4, 4, 4))
_TE_BLOCKWISE = replace(
    _TE_BLOCKS, name="float8-blockwise", gain_key="gemm_fp8_blockwise", experts="float8-blockwise",
    scale=Operands(2 * BLOCK, 2 * BLOCK, 2 * BLOCK), saved_bytes=1 + BLOCK,
    weight_copy_bytes=2 * (1 + BLOCK), weight_copies=1,
    tp_wire_bytes=1 + BLOCK, tp_gradient_wire_bytes=1 + BLOCK,
)  # fmt: skip
_TE_MXFP8 = replace(
    _TE_BLOCKS, name="mxfp8", gain_key="gemm_mxfp8", experts="mxfp8",
    scale=Operands(2 * MX_SCALE, 2 * MX_SCALE, 2 * MX_SCALE),
    fused_kernels=2, saved_bytes=1 + MX, weight_copy_bytes=2 * (1 + MX), weight_copies=1,
    wire_bytes=2, tp_wire_bytes=1 + MX,
    tp_gradient_wire_bytes=1 + MX, multiple=32, rows_multiple=32, group_multiple=MX_ROWS,
)  # fmt: skip
_TE_NVFP4 = replace(
    _TE_BLOCKS, name="nvfp4", peak="fp4", gain_key="gemm_fp4", experts="nvfp4",
    scale=Operands(2, 2, 2),
    cast=Operands(2 + 2 * FP4, 2 + 2 * FP4, 2 + 2 * FP4), fused_kernels=3,
    column_amax=Operands(input=1), row_amax=Operands(gradient=1),
    saved_bytes=FP4, weight_copy_bytes=2 * FP4, weight_copies=1, wire_bytes=2, tp_wire_bytes=FP4,
    tp_gradient_wire_bytes=FP4, group_multiple=NV_ROWS,
)  # fmt: skip
# AMD's: blocks of 32 with a scale of 8 bits, so no pass over the tensor before the cast; all that
# is sent stays in 16 bits, and grouped products do. Source: ROCm/TransformerEngine
# common/recipe MXFP4BlockScaling; Primus docs/mxfp4_training.
_MXFP4 = replace(
    _TE_MXFP8, name="mxfp4", peak="fp4", gain_key="gemm_fp4", experts="",
    cast=Operands(2 + 2 * MX4, 2 + 2 * MX4, 2 + 2 * MX4),
    saved_bytes=MX4, weight_copy_bytes=2 * MX4, tp_wire_bytes=2, tp_gradient_wire_bytes=2,
)  # fmt: skip

# Rows of kernel profiles with fp8 units whose kernels somebody timed. Blocks of 128 came with
# Hopper (Transformer Engine; torchao asks for SM90). Microscaling came with fp4 on both vendors
# (Blackwell, CDNA4), so fp4 stands for its units: torchtitan quantization/mx.py asks for SM100 or
# gfx950, float8.py for SM89. On compute capability 12.0 Transformer Engine refuses mxfp8 ("not
# supported on 12.0+ architectures yet", Megatron-LM issue 4175), its nvfp4 recipe has no kernels
# there (TransformerEngine issue 2255), and torchao's are built for SM100.
_FP8 = frozenset({"hopper", "blackwell", "ada", "rtx-blackwell", "cdna", "cdna4"})

_OF_ROWWISE = Precision(
    torchao=_ROWWISE,
    needs=("fp8",),
    kernel_rows=_FP8,
    titan_converters={"0.2": "quantize.linear.float8", "0.3": "Float8LinearConverter"},
    titan_expert_converters={
        "0.2": "quantize.grouped_mm.float8",
        "0.3": "Float8GroupedExpertsConverter",
    },
)
# in the order of the codes in columns of layouts
PRECISIONS: Registry[Precision] = Registry(
    Precision(torchao=_BF16, needs=("bf16",)),
    Precision(torchao=_FP16, needs=("fp16",)),
    Precision(
        torchao=_TENSORWISE,
        transformer_engine=_TE_TENSORWISE,
        needs=("fp8",),
        kernel_rows=_FP8,
        titan_converters={"0.2": "quantize.linear.float8"},
        titan_expert_converters={"0.2": "quantize.grouped_mm.float8"},
        megatron_settings={"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    ),
    _OF_ROWWISE,
    Precision(
        torchao=_DELAYED,
        transformer_engine=_DELAYED,
        needs=("fp8",),
        kernel_rows=_FP8,
        megatron_settings={"fp8_format": "hybrid", "fp8_recipe": "delayed"},
    ),
    Precision(
        torchao=_BLOCKWISE,
        transformer_engine=_TE_BLOCKWISE,
        needs=("fp8",),
        kernel_rows=_FP8 - {"ada"},
        megatron_settings={"fp8_format": "hybrid", "fp8_recipe": "blockwise"},
    ),
    Precision(
        torchao=_MXFP8,
        transformer_engine=_TE_MXFP8,
        needs=("fp8", "fp4"),
        kernel_rows=frozenset({"blackwell", "cdna4"}),
        titan_converters={"0.2": "quantize.linear.mx", "0.3": "MXFP8LinearConverter"},
        titan_expert_converters={
            "0.2": "quantize.grouped_mm.mx",
            "0.3": "MXFP8GroupedExpertsConverter",
        },
        megatron_settings={"fp8_format": "hybrid", "fp8_recipe": "mxfp8"},
    ),
    Precision(
        torchao=_NVFP4,
        transformer_engine=_TE_NVFP4,
        needs=("fp4",),
        kernel_rows=frozenset({"blackwell"}),
        vendors=frozenset({"nvidia"}),
        titan_converters={"0.3": "NVFP4LinearConverter"},
        megatron_settings={"fp4_format": "e2m1", "fp4_recipe": "nvfp4"},
    ),
    replace(_OF_ROWWISE, torchao=_ROWWISE_GW_HP),
    Precision(
        torchao=_MXFP4,
        transformer_engine=_MXFP4,
        needs=("fp4",),
        kernel_rows=frozenset({"cdna4"}),
        vendors=frozenset({"amd"}),
        megatron_settings={"fp4_format": "e2m1", "fp4_recipe": "mxfp4"},
    ),
    kind="precision",
    field="layout.precision",
)
