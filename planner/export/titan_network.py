"""A network's own numbers (`specs.network`) for TorchTitan.

In 0.2 they are arguments of the model, in 0.3 changes to its config.
Sources: torchtitan 0.2.2 models/*/model/args.py, models/moe/moe.py (MoEArgs); 0.3.0
    models/common/{rope,moe,nn_modules}.py, models/deepseek_v3/model.py (Attention.Config.mscale),
    config/configurable.py (traverse).
"""

from collections.abc import Collection, Iterator, Sequence

from planner.export.base import Draft, unstated
from planner.specs.model import ModelSpec
from planner.specs.network import RopeScaling
from planner.trainers.titan_models import Flavor
from planner.trainers.titan_networks import OWN_WAY, lacks, softmax_mscale

# Default of transformers and of TorchTitan's classes; written where the model states none.
UNKNOWN_THETA = 10_000.0
Pairs = list[tuple[str, object]]
_GROUPED = frozenset({"n_group", "topk_group"})
_ON_INPUT = "moe_apply_router_weight_on_input"  # of 0.2 alone
_ROUTER = frozenset({"scoring_func", "norm_topk_prob", "routed_scaling_factor", _ON_INPUT})
EVERYTHING = frozenset({"rope_theta", "rope_scaling", "norm_eps"}) | _ROUTER | _GROUPED


class Source(str):
    """Python text that is written as it is, not as a quoted string."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def scores(model: ModelSpec) -> str:
    """The router's score function.

    Where the model states none, sigmoid with a correction bias and softmax without, as usual.
    """
    return model.scoring_func or ("sigmoid" if model.router_correction_bias else "softmax")


def divides_scores(model: ModelSpec) -> bool:
    """Whether the chosen experts' scores are divided by their sum.

    Where the model does not say, they are, as in most models.
    """
    return model.norm_topk_prob is not False


def model_args_02(model: ModelSpec, kind: str, fields: Collection[str] = EVERYTHING) -> Pairs:
    """Arguments of a 0.2 model class for these fields; the router's are in `moe_args_02`."""
    pairs: Pairs = []
    if "rope_theta" in fields:
        pairs.append(("rope_theta", model.rope_theta or UNKNOWN_THETA))
    if "norm_eps" in fields and model.norm_eps is not None:
        pairs.append(("norm_eps", model.norm_eps))
    return pairs + (_scaling_02(model.rope_scaling, kind) if "rope_scaling" in fields else [])


def _scaling_02(scaling: RopeScaling | None, kind: str) -> Pairs:
    if kind == "llama3":  # its class always scales; a factor of 1 changes nothing
        if scaling is None or scaling.rope_type != "llama3":
            return [("rope_scaling_args", Source("RoPEScalingArgs(scaling_factor=1.0)"))]
        return [("rope_scaling_args", _llama3_02(scaling))]
    if kind == "llama4":
        return [("rope_scaling_args", _llama3_02(scaling) if scaling else None)]
    if kind == "deepseek_v3":
        if scaling is None:
            return [("rope_factor", 1.0)]
        return [
            ("rope_factor", scaling.factor),
            ("original_seq_len", scaling.original_max_position_embeddings),
            ("beta_fast", _whole(scaling.beta_fast)),
            ("beta_slow", _whole(scaling.beta_slow)),
            ("mscale", softmax_mscale(scaling)),
        ]
    if kind == "gpt_oss" and scaling is not None:
        return [
            ("rope_factor", scaling.factor),
            ("original_seq_len", scaling.original_max_position_embeddings),
            ("ntk_alpha", scaling.beta_slow),
            ("ntk_beta", scaling.beta_fast),
        ]
    return [("rope_factor", 1.0)] if kind == "gpt_oss" else []


def _whole(value: float) -> float | int:
    return int(value) if value == int(value) else value


def _llama3_02(scaling: RopeScaling) -> Source:
    numbers = ", ".join(f"{name}={value!r}" for name, value in _llama3(scaling))
    return Source(f"RoPEScalingArgs({numbers})")


def _llama3(scaling: RopeScaling) -> Pairs:
    names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return [("scaling_factor", scaling.factor), *((name, getattr(scaling, name)) for name in names)]


def moe_args_02(model: ModelSpec, fields: Collection[str] = EVERYTHING) -> Pairs:
    """Arguments of MoEArgs for these fields; of groups where there are some, or they differ."""
    grouped = fields is not EVERYTHING or model.n_group > 1
    return _router(model, fields if grouped else EVERYTHING - _GROUPED)


def _router(model: ModelSpec, fields: Collection[str]) -> Pairs:
    """The router's numbers for these fields, by the names that they have in both lines."""
    values: dict[str, tuple[str, object]] = {
        "scoring_func": ("score_func", scores(model)),
        "norm_topk_prob": ("route_norm", divides_scores(model)),
        "routed_scaling_factor": ("route_scale", model.routed_scaling_factor),
        _ON_INPUT: ("score_before_experts", model.moe_apply_router_weight_on_input),
    }
    pairs = [pair for field, pair in values.items() if field in fields]
    if not _GROUPED.isdisjoint(fields):
        groups = (model.n_group or None, model.topk_group or None)
        pairs += zip(("num_expert_groups", "num_limited_groups"), groups, strict=True)
    return pairs


def own_rope_02(model: ModelSpec, kind: str) -> bool:
    """Whether the export must compute rotary frequencies that TorchTitan 0.2's class does not."""
    scaling = model.rope_scaling
    return scaling is not None and (
        scaling.rope_type == "linear" or (scaling.rope_type == "llama3" and kind == "qwen3")
    )


def rope_class_02(scaling: RopeScaling, kind: str) -> str:
    """Source of a class `ScaledModel`: the family's model with scaled rotary frequencies.

    Both families compute angles = position x frequency and keep them in a table. The class makes
    that table again from scaled frequencies, in the family's own form. Source of the formulas:
    transformers, modeling_rope_utils.py (_compute_linear_scaling_rope_parameters,
    _compute_llama3_parameters).
    """
    base, method, width, table = {
        "llama3": (
            "Transformer",
            "_precompute_freqs_cis",
            "self.model_args.dim // self.model_args.n_heads",
            "torch.polar(torch.ones_like(angles), angles)",
        ),
        "qwen3": (
            "Qwen3Model",
            "_precompute_rope_cache",
            "self.model_args.head_dim",
            "torch.cat([angles.cos(), angles.cos(), angles.sin(), angles.sin()], dim=-1)",
        ),
    }[kind]
    return f'''
def scaled(frequencies):
    """Rotary frequencies with the {scaling.rope_type} scaling of the model's config.json."""
{
        _SCALED[scaling.rope_type].format(
            factor=scaling.factor,
            low=scaling.low_freq_factor,
            high=scaling.high_freq_factor,
            before=scaling.original_max_position_embeddings,
        )
    }

class ScaledModel({base}):
    """TorchTitan's model, whose table of rotary angles knows no such scaling, with the table made from scaled frequencies."""

    def {method}(self):
        width = {width}
        frequencies = scaled(1.0 / self.model_args.rope_theta ** (torch.arange(0, width, 2).float() / width))
        angles = torch.outer(torch.arange(self.model_args.max_seq_len).float(), frequencies)
        return {table}

'''  # noqa: E501


_SCALED = {
    "linear": "    return frequencies / {factor}\n",
    "llama3": """    turns = {before} * frequencies / (2 * math.pi)  # within the context that was trained first
    share = ((turns - {low}) / ({high} - {low})).clamp(0, 1)
    return frequencies * (share + (1 - share) / {factor})
""",  # noqa: E501
}


# ---- 0.3 -----------------------------------------------------------------------------------------


def adjusted_03(model: ModelSpec, kind: str, fields: Collection[str] = EVERYTHING) -> str:
    """Source of a function `adjusted` that sets these fields in a built config of the family.

    It sets every layer alike. Empty where there is nothing to set.
    """
    eps = model.norm_eps if "norm_eps" in fields else None
    blocks = [] if eps is None else [_loop("RMSNorm", [("eps", eps)])]
    rope: Pairs = [("theta", model.rope_theta or UNKNOWN_THETA)] if "rope_theta" in fields else []
    if "rope_scaling" in fields:
        rope += _scaling_03(model.rope_scaling)
    if rope:
        blocks.append(_loop("RoPE", rope))
    if "rope_scaling" in fields and kind == "deepseek_v3" and model.rope_scaling is not None:
        blocks.append(_loop("Attention", [("mscale", softmax_mscale(model.rope_scaling))]))
    router = _router(model, {*fields} - {_ON_INPUT}) if model.is_moe else []
    if router:
        blocks.append(_loop("TokenChoiceTopKRouter", router))
    if not blocks:
        return ""
    return f'''
def adjusted(config):
    """The model's own numbers, as in its config.json, where TorchTitan's tables have others."""
{"".join(blocks)}    return config

'''


def _loop(name: str, pairs: Sequence[tuple[str, object]]) -> str:
    lines = "".join(f"        found.{key} = {value!r}\n" for key, value in pairs)
    return f"    for _, found, _, _ in config.traverse({name}.Config):\n{lines}"


def _scaling_03(scaling: RopeScaling | None) -> Pairs:
    if scaling is None:
        return [("scaling", "none")]
    if scaling.rope_type == "llama3":
        return [("scaling", "llama"), *_llama3(scaling)]
    return [
        ("scaling", "yarn"),
        ("rope_factor", scaling.factor),
        ("beta_fast", scaling.beta_fast),
        ("beta_slow", scaling.beta_slow),
        ("original_seq_len", scaling.original_max_position_embeddings),
        ("truncate", scaling.truncate),
    ]


# ---- what is not carried -------------------------------------------------------------------------


def name_what_is_left_out(draft: Draft, kind: str, line: str, flavor: Flavor | None) -> None:
    """Gaps for what no setting expresses.

    None blocks: each changes the loss or a regulariser, or TorchTitan leaves it out as well in what
    it ships as this model.
    """
    model = draft.model
    for name in unstated(model):
        _unknown(draft, name, kind, flavor)
    if flavor is not None:
        for name, words in lacks(model, flavor.module, line):
            rule = f"is not in TorchTitan's {flavor.module}, its own form of this model: {words}"
            remedy = "weights trained so are not those of transformers"
            if name in OWN_WAY.get(flavor.module, ()):
                draft.gap(f"model.{name}", rule, remedy, blocking=False)
    for name, rule in _left_out(draft, kind, line):
        remedy = "no setting is needed where that is what you want"
        if name == "unread_keys":
            remedy = "check that none changes the network"
        value = getattr(model, name)
        shown = f"{value.rope_type} x{value.factor:g}" if isinstance(value, RopeScaling) else None
        draft.gap(f"model.{name}", rule, remedy, blocking=False, shown=shown)


def _left_out(draft: Draft, kind: str, line: str) -> Iterator[tuple[str, str]]:
    """Fields of the model that are left out, each with the reason."""
    model, seq_len = draft.model, draft.training.seq_len
    if model.num_nextn_predict_layers > 0:
        yield "num_nextn_predict_layers", "is left out: multi-token prediction is not priced"
    if model.router_aux_loss_coef:
        unbalanced = kind == "qwen3" and line == "0.2"
        balance = "and qwen3 is not balanced" if unbalanced else "it balances experts by a bias"
        yield ("router_aux_loss_coef", f"is left out: TorchTitan has no auxiliary loss, {balance}")
    if model.router_z_loss_coef:
        yield "router_z_loss_coef", "is left out: TorchTitan has no z-loss"
    if model.router_jitter_noise > 0:
        yield "router_jitter_noise", "is left out: TorchTitan has no router noise"
    if model.dropout > 0:
        yield "dropout", "is left out: TorchTitan has no dropout, and none is priced"
    if model.n_group > 1 and model.topk_method == "group_limited_greedy":
        yield "topk_method", "is not in TorchTitan, which ranks groups by their two best experts"
    if model.n_group > 1 and draft.version == "0.2.0":
        yield "n_group", f"is not in TorchTitan {draft.version}: a token chooses among all experts"
    old = kind == "deepseek_v3" and line == "0.2"
    scaling = model.rope_scaling
    before = 0 if scaling is None else scaling.original_max_position_embeddings
    if old and 0 < seq_len <= before:
        rule = f"holds in TorchTitan beyond {before} tokens only, and here sequences have {seq_len}"
        yield "rope_scaling", rule
    if old and model.norm_eps is not None:
        rule = "holds for every norm but the last, which has torch's own epsilon in TorchTitan 0.2"
        yield "norm_eps", rule
    if model.norm_plus_one:
        yield "norm_plus_one", "is not in TorchTitan: its norms hold 1 + weight as the weight"
    if model.unread_keys:
        yield "unread_keys", "are keys of the config.json that we do not know"


def _unknown(draft: Draft, name: str, kind: str, flavor: Flavor | None) -> None:
    guesses = {
        "rope_theta": UNKNOWN_THETA,
        "norm_eps": "the class's own",
        "scoring_func": scores(draft.model),
        "norm_topk_prob": True,
    }
    written, owner = guesses[name], "is unknown"
    if flavor is not None:
        written = flavor.facts.get(name, written)
        owner = f"is unknown; TorchTitan's {flavor.flavor} is taken for it"
    shown = f"{written:g}" if isinstance(written, float) else str(written)
    remedy = f"give {name} as in the model's config.json"
    draft.gap(f"model.{name}", f"{owner}: {shown} is used", remedy, blocking=False)
