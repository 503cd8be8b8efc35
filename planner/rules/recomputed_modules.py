"""Which of Megatron-LM's --recompute-modules a release, a model and its precision allow.

Source: Megatron-LM core 0.12 to 0.18 megatron/core/transformer/transformer_config.py.
"""

import numpy as np

from planner.columns import BoolColumn, LayoutBatch
from planner.precision import PRECISIONS
from planner.rules.base import Context, Rule, under
from planner.specs.layout import AC_KINDS, DTYPES, RECOMPUTE_MODULES, Layout, modules_of, parse_ac

MODULES = AC_KINDS.index("modules")
DELAYED, FP16 = PRECISIONS.names.index("float8-delayed"), PRECISIONS.names.index("fp16")
WIDE = DTYPES.index("float32")
_READS = frozenset({"ac_kind", "ac_value"})


def recomputes(x: LayoutBatch, *names: str) -> BoolColumn:
    """Whether layouts recompute one of these modules by its name, (N,)."""
    bits = sum(1 << RECOMPUTE_MODULES.index(name) for name in names)
    return np.asarray((x.ac_kind == MODULES) & ((x.ac_value.astype(np.int64) & bits) != 0))


def modules_in(c: Context) -> frozenset[str]:
    """Modules that the model has; a norm is one where it is not fused into a linear layer."""
    latents, experts = c.model.uses_mla or c.model.compresses, c.model.is_moe
    has = {
        "mlp": c.model.num_dense_layers > 0,
        "layernorm": latents or experts,
        "moe_act": experts,
        "moe": experts,
        "mla_up_proj": latents,
        "shared_experts": c.model.shared_expert_intermediate_size > 0,
    }
    return frozenset(name for name in RECOMPUTE_MODULES if has.get(name, True))


def _without(x: Layout, *names: str) -> str:
    """The remedy that leaves these modules out."""
    rest = [name for name in modules_of(parse_ac(x.ac)[1]) if name not in names]
    return "set ac to " + (f"modules-{'+'.join(rest)}" if rest else "none")


MODULE_RULES: tuple[Rule, ...] = (
    Rule(
        key="shared experts are recomputed from core 0.14 on",
        field="ac",
        reads=_READS,
        applies=under("megatron", before="0.14"),
        broken=lambda x, c: recomputes(x, "shared_experts"),
        rule="{c.trainer.title} core {c.release.number} has no shared_experts in "
        "--recompute-modules",
        remedy=lambda x, c: _without(x, "shared_experts"),
    ),
    Rule(
        key="mla_up_proj is a module of multi-head latent attention",
        field="ac",
        reads=_READS,
        applies=lambda c: "modules" in c.trainer.ac_kinds and "mla_up_proj" not in modules_in(c),
        broken=lambda x, c: recomputes(x, "mla_up_proj"),
        rule="mla_up_proj is recomputed only under multi-head latent attention, which "
        "{c.model.name} has not",
        remedy=lambda x, c: _without(x, "mla_up_proj"),
    ),
    Rule(
        key="moe_act is a module of grouped experts",
        field="ac",
        reads=_READS | {"precision", "param_dtype"},
        applies=lambda c: "modules" in c.trainer.ac_kinds,
        # --moe-grouped-gemm refuses any dtype but bf16 (training/arguments.py)
        broken=lambda x, c: (
            recomputes(x, "moe_act")
            & ((x.precision == FP16) | (x.param_dtype == WIDE) | (not c.model.is_moe))
        ),
        rule=lambda x, c: (
            "moe_act is recomputed only in grouped experts, which "
            + ("are of bf16" if c.model.is_moe else f"{c.model.name} has not")
        ),
        remedy=lambda x, c: _without(x, "moe_act"),
    ),
    Rule(
        key="delayed scaling excludes discarded outputs",
        field="ac",
        reads=_READS | {"precision"},
        applies=under("megatron", since="0.13"),
        broken=lambda x, c: recomputes(x, "moe_act", "layernorm") & (x.precision == DELAYED),
        rule="{c.trainer.title} core {c.release.number} recomputes no moe_act or layernorm in "
        "{x.precision}",
        remedy=lambda x, c: (
            f"{_without(x, 'moe_act', 'layernorm')}, or precision to float8-tensorwise"
        ),
    ),
    Rule(
        key="an overlapped exchange excludes recomputed experts",
        field="ac",
        reads=_READS | {"ep"},
        applies=lambda c: c.training.overlap.ep is True and under("megatron", since="0.17")(c),
        broken=lambda x, c: recomputes(x, "moe") & (x.ep > 1),
        rule="{c.trainer.title} core {c.release.number} recomputes no whole experts (moe) where "
        "their exchange runs under compute",
        remedy=lambda x, c: f"{_without(x, 'moe')}, or training.overlap.ep to false",
    ),
)
