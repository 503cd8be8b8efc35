"""A network's own numbers (`specs.network`) as Megatron-LM's arguments.

Sources: Megatron-LM core 0.14 megatron/training/arguments.py; megatron/core/transformer/
    {transformer_config,multi_latent_attention}.py, transformer/moe/moe_utils.py
    (topk_routing_with_score_function), models/common/embeddings/rotary_pos_embedding.py
    (_apply_scaling).
"""

from collections.abc import Sequence

from planner.export.base import Draft
from planner.specs.model import ModelSpec
from planner.specs.network import RopeScaling
from planner.trainers.megatron_models import YARN_SINCE
from planner.trainers.release import Release

UNKNOWN_THETA = 10_000  # --rotary-base's own default
_LLAMA31 = (1.0, 4.0, 8192)  # what --use-rope-scaling assumes
_MLA_YARN = (32.0, 1.0, 4096)  # fixed in MLATransformerConfig; no argument changes them
TEMPERATURE_FROM = 8192  # floor_scale of Llama 4's configuration class
_NO_AUX_LOSS = "none"


def rope_arguments(draft: Draft, release: Release) -> list[str]:
    """Rotary base, rotated share, scaling, layers without; empty for a model without RoPE."""
    model = draft.model
    if model.position_embedding != "rope":
        return []
    theta = model.rope_theta or UNKNOWN_THETA
    if theta != int(theta):
        rule = "is rounded: --rotary-base is a whole number"
        draft.gap("model.rope_theta", theta, rule, "no setting is needed", blocking=False)
    arguments = ["--rotary-base", str(round(theta))]
    if model.partial_rotary_factor != 1:
        arguments += ["--rotary-percent", f"{model.partial_rotary_factor:g}"]
    if model.rope_mask:
        arguments += ["--no-rope-freq", _skipped(model)]
    return arguments + (_mla_scaling(draft) if model.uses_mla else _scaling(draft, release))


def _skipped(model: ModelSpec) -> str:
    return "[" + ",".join(str(int(not rotates)) for rotates in model.rope_mask) + "]"


def _scaling(draft: Draft, release: Release) -> list[str]:
    scaling = draft.model.rope_scaling
    if scaling is None:
        return []
    if scaling.rope_type == "yarn":
        return _yarn(draft, scaling, release)
    if scaling.rope_type == "linear":
        return ["--rotary-seq-len-interpolation-factor", str(round(scaling.factor or 1))]
    if scaling.rope_type != "llama3":
        return []  # trainers.megatron_models refuses it
    held = (
        scaling.low_freq_factor,
        scaling.high_freq_factor,
        scaling.original_max_position_embeddings,
    )
    _fixed(draft, scaling, held, _LLAMA31)
    return ["--use-rope-scaling", "--rope-scaling-factor", f"{scaling.factor:g}"]


def _yarn(draft: Draft, scaling: RopeScaling, release: Release) -> list[str]:
    """YaRN without MLA: core 0.19 training/argument_utils.py (_apply_yarn_config_from_args).

    Megatron-Bridge, which needs no arguments for it, trains it under older releases too.
    """
    if release.before(YARN_SINCE):
        rule = f"has no argument in {release.number} ({YARN_SINCE}: --position-embedding-type yarn)"
        remedy = "set training.trainer_version to 0.19, or run Megatron-Bridge's recipe"
        draft.gap("model.rope_scaling", scaling.rope_type, rule, remedy)
    flags = {
        "--rotary-scaling-factor": scaling.factor,
        "--yarn-original-max-position-embeddings": scaling.original_max_position_embeddings,
        "--yarn-beta-fast": scaling.beta_fast,
        "--yarn-beta-slow": scaling.beta_slow,
    }
    arguments = [
        word for flag, value in flags.items() if value is not None for word in (flag, f"{value:g}")
    ]
    return arguments + ["--no-yarn-correction-range-round-to-int"] * (scaling.truncate is False)


def activation_arguments(model: ModelSpec) -> list[str]:
    """The MLP's activation; gpt-oss clamps both halves and adds one to the linear one.

    Source: core 0.16 examples/post_training/modelopt/conf/openai/gpt-oss-20b.sh.
    """
    if model.swiglu_limit is not None:
        limit = f"{model.swiglu_limit:g}"
        return [
            *("--quick-geglu", "--glu-linear-offset", "1.0"),
            *("--activation-func-clamp-value", limit),
        ]
    return {"swiglu": ["--swiglu"], "squared-relu": ["--squared-relu"], "gelu": []}[model.mlp]


def _mla_scaling(draft: Draft) -> list[str]:
    scaling = draft.model.rope_scaling
    if scaling is None or scaling.rope_type != "yarn":
        return ["--rope-type", "rope"]
    held = (scaling.beta_fast, scaling.beta_slow, scaling.original_max_position_embeddings)
    _fixed(draft, scaling, held, _MLA_YARN)
    return [
        "--rope-type",
        "yarn",
        "--rotary-scaling-factor",
        f"{scaling.factor:g}",
        "--mscale",
        f"{scaling.mscale or 1.0:g}",
        "--mscale-all-dim",
        f"{scaling.mscale_all_dim or 0.0:g}",
    ]


def _fixed(
    draft: Draft, scaling: RopeScaling, held: tuple[object, ...], fixed: tuple[object, ...]
) -> None:
    if held != fixed:
        rule = f"has {held} where Megatron-LM has {fixed} and no argument for it"
        draft.gap(
            "model.rope_scaling", scaling.rope_type, rule, "change it in the code", blocking=False
        )


def norm_arguments(model: ModelSpec) -> list[str]:
    arguments = [] if model.norm_eps is None else ["--norm-epsilon", f"{model.norm_eps:g}"]
    arguments += ["--apply-layernorm-1p"] if model.norm_plus_one else []
    return arguments + (["--qk-l2-norm"] if model.qk_l2_norm else [])


def router_arguments(draft: Draft) -> list[str]:
    """How a token's experts are chosen and weighted, and the losses that balance them."""
    model = draft.model
    sigmoid = (
        model.scoring_func or ("sigmoid" if model.router_correction_bias else "softmax")
    ) == "sigmoid"
    arguments = ["--moe-router-load-balancing-type", _balancing(model)]
    if model.router_aux_loss_coef:
        arguments += ["--moe-aux-loss-coeff", f"{model.router_aux_loss_coef:g}"]
    if sigmoid:
        arguments += ["--moe-router-score-function", "sigmoid"]
    elif model.norm_topk_prob is False:
        arguments.append("--moe-router-pre-softmax")
    if model.router_correction_bias:
        arguments.append("--moe-router-enable-expert-bias")
    if model.n_group > 1:
        arguments += ["--moe-router-num-groups", str(model.n_group)]
        arguments += ["--moe-router-group-topk", str(model.topk_group)]
    if model.routed_scaling_factor != 1:
        arguments += ["--moe-router-topk-scaling-factor", f"{model.routed_scaling_factor:g}"]
    if model.router_z_loss_coef:
        arguments += ["--moe-z-loss-coeff", f"{model.router_z_loss_coef:g}"]
    if model.router_jitter_noise:
        arguments += ["--moe-input-jitter-eps", f"{model.router_jitter_noise:g}"]
    return arguments + ["--moe-apply-probs-on-input"] * model.moe_apply_router_weight_on_input


def _balancing(model: ModelSpec) -> str:
    if model.router_aux_loss_coef == 0 or (
        model.router_correction_bias and not model.router_aux_loss_coef
    ):
        return _NO_AUX_LOSS
    return "seq_aux_loss" if model.seq_aux else "aux_loss"


def name_what_is_left_out(draft: Draft) -> None:
    """Gaps for what no argument expresses.

    Each is another constant, loss or regulariser; none is another operation.
    """
    model = draft.model
    wanted = ["rope_theta"] * (model.position_embedding == "rope") + ["norm_eps"]
    if model.is_moe:
        wanted += ["scoring_func", "norm_topk_prob"]
        wanted += ["router_aux_loss_coef"] * (not model.router_correction_bias)
    for name in wanted:
        if getattr(model, name) is None:
            remedy = f"give {name} as in the model's config.json"
            rule = "is unknown: Megatron-LM's own default is used"
            draft.gap(f"model.{name}", None, rule, remedy, blocking=False)
    rows: Sequence[tuple[bool, str, str]] = (
        (
            model.num_nextn_predict_layers > model.mtp_num_layers,
            "num_nextn_predict_layers",
            "is left out: set mtp_num_layers of the model to train and price it",
        ),
        (
            model.attn_temperature_tuning and draft.training.seq_len > TEMPERATURE_FROM,
            "attn_temperature_tuning",
            f"is not in Megatron-LM: it begins at position {TEMPERATURE_FROM}",
        ),
        (
            model.dropout > model.residual_dropout,
            "dropout",
            "of attention and embedding is left out: none is priced",
        ),
        (
            model.n_group > 1 and model.topk_method == "group_limited_greedy",
            "topk_method",
            "is not in Megatron-LM, which ranks groups by the sum of their best experts",
        ),
        (bool(model.unread_keys), "unread_keys", "are keys of the config.json that we do not know"),
    )
    for broken, name, rule in rows:
        if broken:
            value = getattr(model, name)
            shown = list(value) if isinstance(value, tuple) else value
            draft.gap(f"model.{name}", shown, rule, "check whether you want it", blocking=False)
