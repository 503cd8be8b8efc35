"""Numbers of a config.json beyond a network's shapes that change its outputs.

`Network` holds the fields, and `ModelSpec` inherits them. None changes the predicted time or
memory. An export writes them into the trainer's model, or names those that the trainer has no
setting for.
"""

import math
from typing import Annotated

from pydantic import Field, StrictBool, StrictInt

from planner.specs.validation import Value

Number = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[StrictInt, Field(ge=0)]


class RopeScaling(Value, extra="forbid"):
    """How rotary frequencies are changed to reach further than training: a config's `rope_scaling`.

    rope_type: linear, dynamic, yarn, llama3, longrope, or any other word of the config.
    factor: how much further.
    original_max_position_embeddings: tokens before; 0 unknown.
    low_freq_factor, high_freq_factor: llama3 only.
    beta_fast, beta_slow, mscale, mscale_all_dim, attention_factor, truncate: yarn only.
    short_factor, long_factor: longrope only, one per pair of rotated widths.
    Source: transformers, modeling_rope_utils.py.
    """

    rope_type: str
    factor: Number | None = None
    original_max_position_embeddings: Count = 0
    low_freq_factor: Number | None = None
    high_freq_factor: Number | None = None
    beta_fast: Number = 32.0
    beta_slow: Number = 1.0
    mscale: Number | None = None
    mscale_all_dim: Weight | None = None
    attention_factor: Number | None = None
    truncate: StrictBool = True
    short_factor: tuple[Number, ...] = ()
    long_factor: tuple[Number, ...] = ()


class Network(Value, extra="forbid"):
    """Fields of a config.json that change what a network computes, not its parameters or its speed.

    Names are Hugging Face's where several families share one. None means unknown.

    rope_theta: base of the rotary frequencies.
    rope_local_base_freq: the base in layers with a sliding window (Gemma 3); None: rope_theta.
    rope_scaling: None means no scaling where rope_theta is known.
    partial_rotary_factor: share of a head's width that is rotated.
    rope_mask: per layer, whether it rotates at all (Llama 4, SmolLM3); (): all do.
    alibi: ALiBi biases (position_embedding is then "none").

    norm_eps: epsilon of the norms.
    norm_plus_one: norms multiply by 1 + weight (Gemma, Nemotron).
    post_norm: norms follow attention and MLP instead of preceding them (OLMo 2).
    qk_l2_norm: queries and keys are normalised without weights (Llama 4).
    qk_norm_after_rope: their norm follows the rotation (Hunyuan).
    hidden_act: activation of the MLP.
    swiglu_limit: clamp of gpt-oss's activation.
    swiglu_limits: clamp in each layer, 0 for none, where layers differ (Step 3.5, K-EXAONE 2).

    attention_multiplier: factor of query times key; None: 1 / sqrt(head_dim).
    attn_logit_softcapping, final_logit_softcapping: x -> cap * tanh(x / cap) on attention scores
        and logits.
    clip_qkv: clamp of queries, keys and values.
    attn_temperature_tuning: queries grow with their position in layers without RoPE (Llama 4).
    embedding_multiplier, residual_multiplier, logits_multiplier: factors of the embedding, of what
        each block adds, and of the logits.
    dropout: the largest dropout probability of the config.
    residual_dropout: that behind attention and feed-forward, before the sum with the residual.

    scoring_func: softmax or sigmoid of the router's logits.
    norm_topk_prob: the chosen experts' scores are divided by their sum.
    routed_scaling_factor: factor of the scores.
    n_group, topk_group: experts are in n_group groups and a token may choose from topk_group of
        them (0: no groups).
    topk_method: how groups are ranked (group_limited_greedy: by their best expert; noaux_tc: by
        their best two).
    moe_apply_router_weight_on_input: scores multiply an expert's input (Llama 4).
    router_aux_loss_coef, router_z_loss_coef: weights of these losses.
    seq_aux: the auxiliary loss is computed per sequence.
    router_jitter_noise: noise on the router's input.
    num_nextn_predict_layers: layers for multi-token prediction that the model has. Those in
        `mtp_num_layers` are priced and counted.

    unread_keys: keys of the config.json that we do not know, so that an export can name them.
    left_out: parts of a multimodal config besides the language model; only the latter is priced.
    """

    rope_theta: Number | None = None
    rope_local_base_freq: Number | None = None
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    rope_mask: tuple[StrictBool, ...] = ()
    alibi: StrictBool = False

    norm_eps: Number | None = None
    norm_plus_one: StrictBool = False
    post_norm: StrictBool = False
    qk_l2_norm: StrictBool = False
    qk_norm_after_rope: StrictBool = False
    hidden_act: str | None = None
    swiglu_limit: Number | None = None
    swiglu_limits: tuple[Weight, ...] = ()

    attention_multiplier: Number | None = None
    attn_logit_softcapping: Number | None = None
    final_logit_softcapping: Number | None = None
    clip_qkv: Number | None = None
    attn_temperature_tuning: StrictBool = False
    embedding_multiplier: Number = 1.0
    residual_multiplier: Number = 1.0
    logits_multiplier: Number = 1.0
    dropout: Weight = 0.0
    residual_dropout: Weight = 0.0

    scoring_func: str | None = None
    norm_topk_prob: StrictBool | None = None
    routed_scaling_factor: Number = 1.0
    n_group: Count = 0
    topk_group: Count = 0
    topk_method: str | None = None
    moe_apply_router_weight_on_input: StrictBool = False
    router_aux_loss_coef: Weight | None = None
    router_z_loss_coef: Weight | None = None
    seq_aux: StrictBool = False
    router_jitter_noise: Weight = 0.0
    num_nextn_predict_layers: Count = 0

    unread_keys: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


NETWORK_FIELDS = frozenset(Network.model_fields)


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's factor on the square root of attention logits.

    0.1 mscale ln(factor) + 1, and 1 where nothing is stretched.
    Source: DeepSeek-V3, modeling_deepseek.py, yarn_get_mscale.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
