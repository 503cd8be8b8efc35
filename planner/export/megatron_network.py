"""A network's own numbers (`specs.network`) as Megatron-LM's arguments.

Sources: Megatron-LM core 0.14 megatron/training/arguments.py; megatron/core/transformer/
    {transformer_config,multi_latent_attention}.py, transformer/moe/moe_utils.py
    (topk_routing_with_score_function), models/common/embeddings/rotary_pos_embedding.py
    (_apply_scaling).
"""

from collections.abc import Iterator

from planner.export.base import Draft, Settings, Value, unstated
from planner.specs.model import ModelSpec
from planner.specs.network import RopeScaling
from planner.trainers.megatron_models import YARN_SINCE
from planner.trainers.release import Release

UNKNOWN_THETA = 10_000  # --rotary-base's own default
_LLAMA31 = (1.0, 4.0, 8192)  # what --use-rope-scaling assumes
_MLA_YARN = (32.0, 1.0, 4096)  # fixed in MLATransformerConfig; no argument changes them
TEMPERATURE_FROM = 8192  # floor_scale of Llama 4's configuration class
_NO_AUX_LOSS = "none"


def rope_settings(draft: Draft, release: Release) -> Settings:
    """Rotary base, rotated share, scaling, layers without; empty for a model without RoPE."""
    model = draft.model
    if model.position_embedding != "rope":
        return {}
    theta = model.rope_theta or UNKNOWN_THETA
    if theta != int(theta):
        rule = "is rounded: --rotary-base is a whole number"
        draft.gap("model.rope_theta", rule, "no setting is needed", blocking=False)
    settings: Settings = {"rotary_base": round(theta)}
    if model.partial_rotary_factor != 1:
        settings["rotary_percent"] = f"{model.partial_rotary_factor:g}"
    if model.rope_mask:
        skipped = ",".join(str(int(not rotates)) for rotates in model.rope_mask)
        settings["no_rope_freq"] = f"[{skipped}]"
    return settings | (_mla_scaling(draft) if model.uses_mla else _scaling(draft, release))


def _scaling(draft: Draft, release: Release) -> Settings:
    scaling = draft.model.rope_scaling
    if scaling is None:
        return {}
    if scaling.rope_type == "yarn":
        return _yarn(draft, scaling, release)
    if scaling.rope_type == "linear":
        return {"rotary_seq_len_interpolation_factor": round(scaling.factor or 1)}
    if scaling.rope_type != "llama3":
        return {}  # trainers.megatron_models refuses it
    held = (
        scaling.low_freq_factor,
        scaling.high_freq_factor,
        scaling.original_max_position_embeddings,
    )
    _fixed(draft, held, _LLAMA31)
    return {"use_rope_scaling": True, "rope_scaling_factor": f"{scaling.factor:g}"}


def _yarn(draft: Draft, scaling: RopeScaling, release: Release) -> Settings:
    """YaRN without MLA: core 0.19 training/argument_utils.py (_apply_yarn_config_from_args).

    Megatron-Bridge, which needs no arguments for it, trains it under older releases too.
    """
    if release.before(YARN_SINCE):
        rule = f"has no argument in {release.number} ({YARN_SINCE}: --position-embedding-type yarn)"
        remedy = "set training.trainer_version to 0.19, or run Megatron-Bridge's recipe"
        draft.gap("model.rope_scaling", rule, remedy, shown=scaling.rope_type)
    numbers = {
        "rotary_scaling_factor": scaling.factor,
        "yarn_original_max_position_embeddings": scaling.original_max_position_embeddings,
        "yarn_beta_fast": scaling.beta_fast,
        "yarn_beta_slow": scaling.beta_slow,
    }
    return {
        **{name: f"{value:g}" for name, value in numbers.items() if value is not None},
        "no_yarn_correction_range_round_to_int": scaling.truncate is False,
    }


def activation_settings(model: ModelSpec) -> Settings:
    """The MLP's activation; gpt-oss clamps both halves and adds one to the linear one.

    Source: core 0.16 examples/post_training/modelopt/conf/openai/gpt-oss-20b.sh.
    """
    if model.swiglu_limit is not None:
        clamp: Settings = {"activation_func_clamp_value": f"{model.swiglu_limit:g}"}
        return {"quick_geglu": True, "glu_linear_offset": "1.0", **clamp}
    return {} if model.mlp == "gelu" else {model.mlp.replace("-", "_"): True}


def _mla_scaling(draft: Draft) -> Settings:
    scaling = draft.model.rope_scaling
    if scaling is None or scaling.rope_type != "yarn":
        return {"rope_type": "rope", "no_rope_fusion": True}  # "only works with YARN RoPE"
    held = (scaling.beta_fast, scaling.beta_slow, scaling.original_max_position_embeddings)
    _fixed(draft, held, _MLA_YARN)
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": f"{scaling.factor:g}",
        "mscale": f"{scaling.mscale or 1.0:g}",
        "mscale_all_dim": f"{scaling.mscale_all_dim or 0.0:g}",
    }


def _fixed(draft: Draft, held: tuple[object, ...], fixed: tuple[object, ...]) -> None:
    scaling = draft.model.rope_scaling
    if scaling is not None and held != fixed:
        rule = f"has {held} where Megatron-LM has {fixed} and no argument for it"
        remedy, shown = "change it in the code", scaling.rope_type
        draft.gap("model.rope_scaling", rule, remedy, blocking=False, shown=shown)


def norm_settings(model: ModelSpec) -> Settings:
    return {
        "norm_epsilon": False if model.norm_eps is None else f"{model.norm_eps:g}",
        "apply_layernorm_1p": model.norm_plus_one,
        "qk_l2_norm": model.qk_l2_norm,
    }


def router_settings(draft: Draft) -> Settings:
    """How a token's experts are chosen and weighted, and the losses that balance them."""
    model = draft.model
    usual = "sigmoid" if model.router_correction_bias else "softmax"
    sigmoid = (model.scoring_func or usual) == "sigmoid"
    grouped = model.n_group > 1
    return {
        "moe_router_load_balancing_type": _balancing(model),
        "moe_aux_loss_coeff": _number(model.router_aux_loss_coef),
        "moe_router_score_function": sigmoid and "sigmoid",
        "moe_router_pre_softmax": not sigmoid and model.norm_topk_prob is False,
        "moe_router_enable_expert_bias": model.router_correction_bias,
        "moe_router_num_groups": grouped and model.n_group,
        "moe_router_group_topk": grouped and model.topk_group,
        "moe_router_topk_scaling_factor": model.routed_scaling_factor != 1
        and f"{model.routed_scaling_factor:g}",
        "moe_z_loss_coeff": _number(model.router_z_loss_coef),
        "moe_input_jitter_eps": _number(model.router_jitter_noise),
        "moe_apply_probs_on_input": model.moe_apply_router_weight_on_input,
    }


def _number(value: float | None) -> Value:
    """A number other than zero, which is not written."""
    return f"{value:g}" if value else False


def _balancing(model: ModelSpec) -> str:
    weight = model.router_aux_loss_coef
    if weight == 0 or (model.router_correction_bias and not weight):
        return _NO_AUX_LOSS
    return "seq_aux_loss" if model.seq_aux else "aux_loss"


def name_what_is_left_out(draft: Draft) -> None:
    """Gaps for what no argument expresses.

    Each is another constant, loss or regulariser; none is another operation.
    """
    model = draft.model
    wanted = unstated(model)
    if model.is_moe and not model.router_correction_bias and model.router_aux_loss_coef is None:
        wanted.append("router_aux_loss_coef")
    for name in wanted:
        rule = "is unknown: Megatron-LM's own default is used"
        remedy = f"give {name} as in the model's config.json"
        draft.gap(f"model.{name}", rule, remedy, blocking=False)
    for name, rule in _left_out(draft):
        draft.gap(f"model.{name}", rule, "check whether you want it", blocking=False)


def _left_out(draft: Draft) -> Iterator[tuple[str, str]]:
    """Fields of the model that are left out, each with the reason."""
    model = draft.model
    if model.num_nextn_predict_layers > model.mtp_num_layers:
        rule = "is left out: set mtp_num_layers of the model to train and price it"
        yield "num_nextn_predict_layers", rule
    if model.attn_temperature_tuning and draft.training.seq_len > TEMPERATURE_FROM:
        rule = f"is not in Megatron-LM: it begins at position {TEMPERATURE_FROM}"
        yield "attn_temperature_tuning", rule
    if model.dropout > model.residual_dropout:
        yield "dropout", "of attention and embedding is left out: none is priced"
    if model.n_group > 1 and model.topk_method == "group_limited_greedy":
        rule = "is not in Megatron-LM, which ranks groups by the sum of their best experts"
        yield "topk_method", rule
    if model.unread_keys:
        yield "unread_keys", "are keys of the config.json that we do not know"
