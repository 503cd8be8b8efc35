"""Mixers of the real transformers: FLOP of torch's counter, and bytes that autograd saves.

    PYTHONPATH=.:.venv/titan python tests/torch_memory/real_mixers.py

Prints one JSON object a mixer. Tensors have shapes and no values (the meta device), but where code
asks which tokens an expert has. FLOP are those of transformers' own code in torch, forward, without
triangular solves, which the counter leaves out. For the bytes, the kernels that a GPU runs (short
convolution, delta rule, gated norm, scan) are stood in for by functions that save what those save:
fla 0.6 and mamba_ssm 2.2, which have none for a CPU.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

BATCH, SEQ = 2, 4096
SHAPES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
WINDOWS = {"sliding_window": 512, "layer_types": ["full_attention", "sliding_attention"]}
DELTA = {
    **SHAPES, **ROUTED, "num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4, "num_experts": 4, "shared_expert_intermediate_size": 32,
}  # fmt: skip
DSA = {
    **SHAPES, **ROUTED, **LATENT, "num_key_value_heads": 4, "q_lora_rank": 48, "index_n_heads": 2,
    "index_head_dim": 32, "index_topk": 256, "n_routed_experts": 8, "n_group": 1, "topk_group": 1,
}  # fmt: skip
DOTS3 = {
    **DSA, "sliding_window": 512, "layer_types": ["indexed_attention", "sliding_attention"],
    "per_layer_config": {
        1: {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 48,
            "qk_nope_head_dim": 48, "head_dim": 64}
    },
}  # fmt: skip
HY4 = {**DSA, "indexer_types": ["full", "shared"], "hc_mult": 4}
KIMI = {
    **ROUTED, **LATENT, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "linear_num_heads": 4, "linear_head_dim": 32, "linear_conv_kernel_dim": 4,
    "intermediate_size": 96, "vocab_size": 128, "num_local_experts": 4, "n_shared_experts": 1,
}  # fmt: skip
MAMBA = {
    **ROUTED, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
    "intermediate_size": 96, "vocab_size": 128, "mamba_num_heads": 8, "mamba_head_dim": 16,
    "ssm_state_size": 32, "n_groups": 2, "conv_kernel": 4, "chunk_size": 64, "n_routed_experts": 4,
    "moe_shared_expert_intermediate_size": 32,
}  # fmt: skip
FALCON = {
    **SHAPES, "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_state": 32, "mamba_n_groups": 2,
    "mamba_chunk_size": 64,
}  # fmt: skip
JAMBA = {
    **SHAPES, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8,
    "mamba_d_state": 16, "num_experts_per_tok": 2,
}  # fmt: skip
MAMBA1 = {
    "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "time_step_rank": 8,
    "state_size": 16,
}  # fmt: skip
LFM = {
    **SHAPES, "num_hidden_layers": 3, "head_dim": 32, "conv_L_cache": 7,
    "layer_types": ["conv", "conv", "full_attention"],
}  # fmt: skip
MINIMAX = {
    **SHAPES, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 64,
}  # fmt: skip
STEP = {
    **SHAPES, **ROUTED, **WINDOWS, "head_dim": 32, "n_routed_experts": 4, "share_expert_dim": 32,
    "num_sliding_attention_heads": 6, "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
MIMO = {
    **SHAPES, **ROUTED, **WINDOWS, "head_dim": 48, "v_head_dim": 32, "n_routed_experts": 4,
}  # fmt: skip
GEMMA4 = {
    **SHAPES, "intermediate_size": 48, "num_key_value_heads": 4, "head_dim": 32,
    "num_global_key_value_heads": 2, "global_head_dim": 64, "attention_k_eq_v": True,
    "sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4,
    "top_k_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip
GEMMA4_SMALL = {
    **SHAPES, "num_hidden_layers": 24, "num_key_value_heads": 1, "head_dim": 16,
    "global_head_dim": 32, "sliding_window": 512, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128, "num_kv_shared_layers": 12, "use_double_wide_mlp": True,
}  # fmt: skip
LONGCAT = {
    **LATENT, "hidden_size": 64, "num_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32, "q_lora_rank": 48, "vocab_size": 128, "n_routed_experts": 16,
    "zero_expert_num": 8, "moe_topk": 6, "head_dim": 16,
}  # fmt: skip
M3 = {
    **SHAPES, "intermediate_size": 32, "dense_intermediate_size": 96,
    "shared_intermediate_size": 32, "head_dim": 32, "num_local_experts": 4,
    "num_experts_per_tok": 2, "rotary_dim": 16, "index_n_heads": 2, "index_head_dim": 16,
    "index_block_size": 64, "index_topk_blocks": 4,
    "layer_types": ["full_attention", "minimax_m3_sparse"],
}  # fmt: skip
V4 = {
    **ROUTED, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 48, "o_groups": 2, "o_lora_rank": 24,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 256, "vocab_size": 128,
    "n_routed_experts": 4, "sliding_window": 128, "layer_types": [
        "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
    ], "mlp_layer_types": ["hash_moe", "moe", "moe"],
}  # fmt: skip
LOOPS = ("gemma4", "latent", "longcat")  # over the experts that have tokens


def real(name: str) -> Any:
    """The code of a family, which has its config too."""
    return import_module(f"transformers.models.{name}.modeling_{name}")


def flops(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


class Saved:
    """A tensor that autograd holds as long as the graph that saved it lives."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # an output that a node saves would keep its node


def saved_bytes(module: torch.nn.Module, run: Callable[[], object]) -> int:
    """Bytes of the storages that autograd saves, weights and buffers left out, each once."""
    own = {one.untyped_storage()._cdata for one in [*module.parameters(), *module.buffers()]}
    found: WeakSet[Saved] = WeakSet()

    def pack(tensor: torch.Tensor) -> Saved:
        saved = Saved(tensor)
        found.add(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        out = run()
    storages = {one.tensor.untyped_storage()._cdata: one.tensor for one in found}
    del out
    return sum(
        tensor.untyped_storage().nbytes() for place, tensor in storages.items() if place not in own
    )


def measured(module: torch.nn.Module, run: Callable[[], object]) -> dict[str, int]:
    return {"flops": flops(run), "saved": saved_bytes(module, run)}


class Kept(torch.autograd.Function):
    """A kernel that returns one tensor and saves the others that it is given."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], source: Any, *saved: Any) -> Any:
        ctx.save_for_backward(*saved)
        return source.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError


class Norm(torch.nn.Module):
    """A norm of one kernel, which saves its input, a gate if it has one, and a number a row."""

    def forward(self, states: Any, *gate: Any) -> Any:
        return Kept.apply(states.shape, states, states, *gate, torch.empty(states.shape[:-1]))


class Experts(torch.nn.Module):
    """Experts that save nothing but their scores."""

    def forward(self, states: Any, index: Any, scores: Any) -> Any:
        return Kept.apply(states.shape, states, scores)


def conv(states: Any, weight: Any, bias: Any = None, **more: object) -> Any:
    return Kept.apply(states.shape, states, states, weight)


def rule(
    query: Any, key: Any, value: Any, g: Any, beta: Any, *, full: bool = False, **more: object
) -> Any:
    """A delta rule in chunks of 64. full: with a decay for each element."""
    q, k, v = (one.contiguous().clone() for one in (query, key, value))
    rows = [torch.empty(one.shape[:3]) for one in (q, k)]
    chunks = [torch.empty(*v.shape[:3], 64, dtype=v.dtype) for _ in range(2 if full else 1)]
    decay = (torch.empty(v.shape), g) if full else (torch.empty(v.shape[:3]),)
    return Kept.apply(v.shape, value, q, k, v, *rows, *decay, beta, *chunks), None


def fused(module: object, q: Any, k: Any, v: Any, mask: Any, **more: object) -> Any:
    """Attention of one kernel, which saves queries, keys, values, output and a number a row."""
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
    held = (q, k, v, torch.empty(q.shape[:3]), *(() if mask is None else (mask,)))
    return Kept.apply(out.shape, q, *held), None


def sdpa(config: Any) -> Any:
    config._attn_implementation = "sdpa"
    return config


@contextmanager
def kernel(code: Any, of: Callable[..., Any]) -> Iterator[None]:
    kernels = code.ALL_ATTENTION_FUNCTIONS
    real, kernels["sdpa"] = kernels["sdpa"], of
    yield
    kernels["sdpa"] = real


def attended(
    code: Any, attention: Any, run: Callable[[], object], core: Callable[..., Any] = fused
) -> dict[str, int]:
    """FLOP of an attention of transformers without its core, and bytes that it saves.

    Its norms and its core are kernels.
    """
    ends = ("_norm", "_a_layernorm", "_only_layernorm")
    for name in [name for name, _ in attention.named_children() if name.endswith(ends)]:
        setattr(attention, name, Norm())
    with kernel(code, core):
        return measured(attention, run)


def turned(module: Any, places: Any) -> Any:
    """Rotary tables as buffers, which all layers share."""
    for name, table in zip(("cos", "sin"), places, strict=True):
        module.register_buffer(name, table)
    return module.cos, module.sin


def delta() -> dict[str, Any]:
    """Gated DeltaNet and gated attention of Qwen3-Next."""
    code = real("qwen3_next")
    config = sdpa(code.Qwen3NextConfig(**DELTA))
    mixer = code.Qwen3NextGatedDeltaNet(config, 0).bfloat16()
    attention = code.Qwen3NextAttention(config, 3).bfloat16()
    places = code.Qwen3NextRotaryEmbedding(config)(X, PLACES)
    run, whole = partial(mixer, X), partial(attention, X, places, None)
    with kernel(code, fused):  # which no counter sees
        counted = {"flops": flops(run), "attention_flops": flops(whole)}
    code.causal_conv1d_fn, code.torch_chunk_gated_delta_rule = conv, rule
    mixer.norm = Norm()
    return {**counted, "saved": saved_bytes(mixer, run), "config": DELTA}


def masked(module: object, q: Any, k: Any, v: Any, mask: Any, **more: object) -> Any:
    """Attention of the one kernel with a mask, which it saves in the format of the queries."""
    return fused(module, q, k, v, None if mask is None else torch.empty(mask.shape, dtype=q.dtype))


def dsa(name: str = "deepseek_v32", family: str = "DeepseekV32") -> dict[str, Any]:
    """DeepSeek sparse attention of DeepSeek-V3.2, or of a family like it."""
    code = real(name)
    config = sdpa(getattr(code, f"{family}Config")(**DSA))
    mixer = getattr(code, f"{family}Attention")(config, 0).bfloat16()
    rotary = getattr(code, f"{family}RotaryEmbedding")(config)
    run = partial(mixer, X, rotary(X, PLACES), CAUSAL)
    counted = flops(run)
    with kernel(code, masked):
        return {"flops": counted, "saved": saved_bytes(mixer, run), "config": DSA}


def axk2() -> dict[str, Any]:
    """Attention of A.X K2, and its gated norm."""
    code = real("axk2")
    norm = code.AXK2GatedRMSNorm(code.AXK2Config(**DSA)).bfloat16()
    norm.norm = Norm()
    return {**dsa("axk2", "AXK2"), "norm": measured(norm, partial(norm, X))}


def streamed(mixing: Any, head: Any, leaving: Callable[..., object]) -> dict[str, Any]:
    """Residual streams around a branch and before the head; leaving: from a mix of them."""
    streams = torch.randn(1, SEQ, 4, 64, dtype=torch.bfloat16, requires_grad=True)
    around = measured(mixing, lambda: leaving(streams, *mixing(streams)))
    return {"streams": around, "head": measured(head, partial(head, streams))}


def hy4(layer: int = 0) -> dict[str, Any]:
    """Eager sparse attention of HY 4 with sinks and a gate, of two sequences, and its streams."""
    code = real("hy_v4")
    config = code.HYV4Config(**HY4)
    config._attn_implementation = "eager"
    attention = code.HYV4Attention(config, layer).bfloat16()
    tables = turned(attention, code.HYV4RotaryEmbedding(config)(ONE, PLACES))
    chosen = torch.zeros(1, SEQ, 256, dtype=torch.int32)
    run = partial(attention, ONE, tables, OPEN, prev_topk_indices=chosen)
    found = {name: 2 * number for name, number in measured(attention, run).items()}

    def leaving(streams: Any, post: Any, mixed: Any) -> object:
        spread = post.float().unsqueeze(-1) * ONE.float().unsqueeze(-2)
        return mixed, (spread + streams.float()).bfloat16()

    both = code.HYV4HyperConnection(config), code.HYV4HyperHead(config)
    return {**found, **streamed(*both, leaving), "config": HY4}


def kimi(full: bool = False) -> dict[str, Any]:
    """Kimi Delta Attention of Kimi Linear, or of Ling 3, whose gates are full."""
    code = real("bailing_hybrid" if full else "kimi_linear")
    given = {**KIMI, "head_dim": 32} if full else KIMI
    family = "BailingHybrid" if full else "KimiLinear"
    config = getattr(code, f"{family}Config")(**given)
    mixer = getattr(code, f"{family}DeltaAttention")(config, 0).bfloat16()
    counted = flops(partial(mixer, X))
    code.causal_conv1d_fn, code.chunk_kimi_delta_attention = conv, partial(rule, full=True)
    mixer.o_norm = Norm()
    return {"flops": counted, "saved": saved_bytes(mixer, partial(mixer, X)), "config": given}


def combined(width: int, *rows: Any) -> Callable[..., Any]:
    """Mamba-2 of one kernel, which saves its input, the scan's output, and rows of a norm's."""

    def kernels(projected: Any, *more: object, **named: Any) -> Any:
        scanned = projected.new_empty(BATCH, SEQ, width)
        return Kept.apply(X.shape, projected, projected, scanned, *rows, named["outproj_weight"])

    return kernels


def mamba() -> dict[str, Any]:
    """Mamba-2 of Nemotron-H, whose scan in torch is of sums that no counter sees."""
    code = real("nemotron_h")
    config = code.NemotronHConfig(**MAMBA)
    mixer = code.NemotronHMamba2Mixer(config, 0).bfloat16()
    code.mamba2_split_conv1d_scan_combined = combined(8 * 16, torch.empty(BATCH * SEQ, 2))
    return {"saved": saved_bytes(mixer, partial(mixer, X)), "config": MAMBA}


def latent() -> dict[str, Any]:
    """Experts on a latent, of Nemotron 3 Super, which transformers runs in a loop."""
    code = real("nemotron_h")
    config = {**MAMBA, "moe_latent_size": 16}
    block = code.NemotronHMoE(code.NemotronHConfig(**config)).bfloat16()
    return {"flops": flops(partial(block, X)), "config": config}


def falcon() -> dict[str, Any]:
    """Mamba-2 of Falcon H1, which stands beside attention and has no norm."""
    code = real("falcon_h1")
    mixer = code.FalconH1Mixer(code.FalconH1Config(**FALCON), 0).bfloat16()
    mixer.register_buffer("mup_vector", torch.ones(1, 1, 1, dtype=torch.bfloat16))
    code.mamba2_split_conv1d_scan_combined = combined(96)
    return {"saved": saved_bytes(mixer, partial(mixer, X)), "config": FALCON}


def jamba() -> dict[str, Any]:
    """Mamba of Jamba, whose kernels run one by one, and copy what is not laid out by channels."""
    code = real("jamba")
    config = code.JambaConfig(**JAMBA)
    norm, code.JambaRMSNorm = code.JambaRMSNorm, lambda *sizes, **more: Norm()
    mixer = code.JambaMambaMixer(config, 0).bfloat16()
    code.JambaRMSNorm = norm

    def laid_out(*given: Any, **more: object) -> Any:
        return conv(*given, **more).mT.contiguous().mT

    def scan(u: Any, delta: Any, a: Any, b: Any, c: Any, z: Any, **more: object) -> Any:
        copies = [one.contiguous() for one in (u, delta, b, c, z)]
        return Kept.apply(u.shape, u, *copies, u.new_empty(u.shape))

    code.causal_conv1d_fn, code.mamba_selective_scan = laid_out, scan
    return {**measured(mixer, partial(mixer, X)), "config": JAMBA}


def mamba1() -> dict[str, Any]:
    """Mamba, the first, in the one function that its kernels have."""
    code = real("mamba")
    mixer = code.MambaMixer(code.MambaConfig(**MAMBA1), 0).bfloat16().train()

    def inner(projected: Any, *more: object, **named: object) -> Any:
        low = projected.new_empty(BATCH, SEQ, 8 + 2 * 16)
        keys, out = projected.new_empty(BATCH, 2 * 16, SEQ), projected.new_empty(BATCH, 128, SEQ)
        return Kept.apply(X.shape, projected, projected, low, keys, out)

    code.mamba_inner_fn = inner
    return {"saved": saved_bytes(mixer, partial(mixer, X)), "config": MAMBA1}


def lfm() -> dict[str, Any]:
    """Gated short convolution and attention with a gate a head, of LFM3."""
    code = real("lfm3")
    config = sdpa(code.Lfm3Config(**LFM))
    mixer = code.Lfm3ShortConv(config, 0).bfloat16()
    attention = code.Lfm3Attention(config, 2).bfloat16()
    places = code.Lfm3RotaryEmbedding(config)(X, PLACES, "full_attention")
    run, whole = partial(mixer, X), partial(attention, X, places, None)
    with kernel(code, fused):  # which no counter sees
        counted = {"flops": flops(run), "attention_flops": flops(whole)}
    code.causal_conv1d_fn = conv
    return {**counted, "saved": saved_bytes(mixer, run), "config": LFM}


def minimax() -> dict[str, Any]:
    """Lightning attention of MiniMax-01, in blocks of its own code, with a norm of one kernel."""
    code = real("minimax")
    mixer = code.MiniMaxLightningAttention(code.MiniMaxConfig(**MINIMAX), 1).bfloat16()
    mixer.norm = Norm()
    return {**measured(mixer, partial(mixer, X, None, None)), "config": MINIMAX}


def of_both_kinds(
    name: str, family: str, config_class: str, keys: Any, masked_first: bool = False
) -> dict[str, Any]:
    """Attention of a layer without and of one with a window, which differ."""
    code = real(name)
    config, found = sdpa(getattr(code, config_class)(**keys)), {}
    rotary = getattr(code, f"{family}RotaryEmbedding")(config)
    for layer, kind in enumerate(("full", "windowed")):
        attention = getattr(code, f"{family}DecoderLayer")(config, layer).self_attn.bfloat16()
        places = turned(attention, rotary(X, PLACES, keys["layer_types"][layer]))
        run = partial(attention, X, places, CAUSAL if masked_first and not layer else None)
        found[kind] = attended(code, attention, run, masked)
    return {**found, "config": keys}


def gemma4() -> dict[str, Any]:
    """Attention of Gemma 4, and FLOP of its whole layers, with a dense MLP beside the experts."""
    code = real("gemma4")
    config = sdpa(code.Gemma4TextConfig(**GEMMA4))
    rotary = code.Gemma4TextRotaryEmbedding(config)
    found: dict[str, Any] = {}
    for kind, place in (("windowed", 0), ("full", 1)):
        layer = code.Gemma4TextDecoderLayer(config, place).bfloat16()
        places = rotary(X, PLACES, config.layer_types[place])
        tables = turned(layer.self_attn, places)
        with torch.no_grad():
            whole = flops(partial(layer, X.detach(), None, {}, position_embeddings=tables))
        run = partial(layer.self_attn, X, tables, None, {})
        found[kind] = {**attended(code, layer.self_attn, run), "layer": whole}
        for name in [name for name, _ in layer.named_children() if name.endswith("layernorm")]:
            setattr(layer, name, Norm())
        for name in ("layernorm_1", "layernorm_2"):
            setattr(layer, f"post_feedforward_{name}", Norm())
        layer.pre_feedforward_layernorm_2 = layer.router.norm = Norm()
        layer.experts = Experts()
        run = partial(layer.train(), X, None, {}, position_embeddings=tables)
        found[kind]["rest"] = attended(code, layer, run)["saved"]
    return {**found, "config": GEMMA4}


def gemma4_small() -> dict[str, Any]:
    """Gemma 4 with per-layer embeddings and shared keys: each kind of layer, and all of them.

    The whole model saves bytes without recomputation, and with that of all layers.
    """
    code = real("gemma4")
    config = sdpa(code.Gemma4TextConfig(**GEMMA4_SMALL))
    rotary, norm = code.Gemma4TextRotaryEmbedding(config), code.Gemma4RMSNorm
    code.Gemma4RMSNorm = lambda *sizes, **more: Norm()
    found: dict[str, Any] = {}

    class Tables(torch.nn.Module):
        def forward(self, states: Any, places: Any, kind: str) -> Any:
            if kind not in dict(self.named_children()):
                self.add_module(kind, torch.nn.Module())
                turned(self.get_submodule(kind), rotary(states, PLACES, kind))
            return self.get_submodule(kind).cos, self.get_submodule(kind).sin

    for kind, place in (("windowed", 0), ("full", 5), ("windowed-shared", 12), ("full-shared", 17)):
        layer = code.Gemma4TextDecoderLayer(config, place).bfloat16().train()
        named = config.layer_types[place]
        width = config.per_layer_config[place].head_dim
        part = torch.zeros(BATCH, SEQ, 8, dtype=torch.bfloat16)
        keys = torch.zeros(2, BATCH, 1, SEQ, width, dtype=torch.bfloat16).unbind()
        layer.part, layer.tables = torch.nn.Buffer(part), Tables()
        layer.keys, layer.values = map(torch.nn.Buffer, keys)
        places = layer.tables(X, None, named)
        layer.part.requires_grad_()
        shared = {named: (layer.keys, layer.values)}
        run = partial(layer, X, layer.part, shared, position_embeddings=places)
        found[kind] = attended(code, layer, run)
    model = code.Gemma4TextModel(config).bfloat16().train()
    model.rotary_emb = Tables()
    tokens = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    masks = {"full_attention": None, "sliding_attention": None}
    run = partial(model, tokens, attention_mask=masks, use_cache=False)
    found["whole"] = attended(code, model, run)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found["whole"]["full"] = attended(code, model, run)["saved"]
    code.Gemma4RMSNorm = norm
    return {**found, "config": GEMMA4_SMALL}


def longcat() -> dict[str, Any]:
    """A layer of LongCat-Flash, whose tokens go to all experts alike, zero experts among them."""
    code = real("longcat_flash")
    config = sdpa(code.LongcatFlashConfig(**LONGCAT))
    norm, code.LongcatFlashRMSNorm = code.LongcatFlashRMSNorm, lambda *sizes, **more: Norm()
    layer = code.LongcatFlashDecoderLayer(config, 0).bfloat16().train()
    code.LongcatFlashRMSNorm = norm
    places = code.LongcatFlashRotaryEmbedding(config)(X, PLACES)
    tables = turned(layer, places)
    alike = torch.arange(BATCH * SEQ * 6).reshape(-1, 6) % 24
    layer.mlp.router.get_topk_indices = lambda scores: alike
    run = partial(layer, X, None, position_embeddings=tables)
    found = attended(code, layer, run)
    layer.mlp.experts = Experts()
    return {**found, "rest": attended(code, layer, run)["saved"], "config": LONGCAT}


def m3() -> dict[str, Any]:
    """MiniMax sparse attention of MiniMax M3, masked."""
    code = real("minimax_m3_vl")
    config = sdpa(code.MiniMaxM3VLTextConfig(**M3))
    places = code.MiniMaxM3VLRotaryEmbedding(config)(X, PLACES)
    attention = code.MiniMaxM3VLAttention(config, 1).bfloat16()
    run = partial(attention, X, turned(attention, places), None)
    return {**attended(code, attention, run), "config": M3}


def v4() -> dict[str, Any]:
    """Attention of each kind of DeepSeek-V4's layers, its streams, and a whole checkpointed layer.

    core: of one sequence, eager; two: of two; else one kernel that saves queries, keys and a
    number a row.
    """
    code = real("deepseek_v4")
    config = code.DeepseekV4Config(**V4, experts_implementation="batched_mm")
    config._attn_implementation = "eager"
    rotary = code.DeepseekV4RotaryEmbedding(config)
    tables = {kind: rotary(ONE, PLACES, kind) for kind in ("main", "compress")}
    found: dict[str, Any] = {}
    streams = torch.randn(1, SEQ, 4, 64, dtype=torch.bfloat16, requires_grad=True)
    for index, kind in enumerate(("shared-kv", "csa", "hca")):
        attention = code.DeepseekV4Attention(config, index).bfloat16()
        run = partial(attention, ONE, tables, PLACES, OPEN)
        found[kind] = {"flops": flops(run), "core": saved_bytes(attention, run)}
        x, mask = torch.cat([ONE.detach()] * 2).requires_grad_(), torch.cat([OPEN] * 2)
        found[kind]["two"] = saved_bytes(attention, partial(attention, x, tables, PLACES, mask))
        with kernel(code, lambda *of, **more: fused(*of[:4], None)):
            sdpa(config)
            found[kind]["saved"] = saved_bytes(attention, run)
            config._attn_implementation = "eager"
        layer = code.DeepseekV4DecoderLayer(config, index).bfloat16()
        ids = torch.zeros(1, SEQ, dtype=torch.long)
        more = {"position_embeddings": tables, "position_ids": PLACES, "attention_mask": OPEN}
        whole = partial(layer, streams, ids, **more)
        again = partial(checkpoint, layer, streams, ids, use_reentrant=False, **more)
        found[kind] |= {"layer": flops(whole), "full": saved_bytes(layer, again)}

    def leaving(streams: Any, post: Any, across: Any, mixed: Any) -> object:
        kept = torch.matmul(across.bfloat16().transpose(-1, -2), streams)
        return mixed, post.bfloat16().unsqueeze(-1) * ONE.unsqueeze(-2) + kept

    both = code.DeepseekV4HyperConnection(config), code.DeepseekV4HyperHead(config)
    return {**found, **streamed(*both, leaving), "config": V4}


RUNS = {
    **{
        run.__name__.replace("_", "-"): run
        for run in (delta, mamba, kimi, latent, falcon, jamba, mamba1, lfm, dsa, axk2, hy4, minimax,
            gemma4, gemma4_small, longcat, m3, v4)
    },
    "ling": partial(kimi, full=True),
    "hy4-shared": partial(hy4, 1),
    "step": partial(of_both_kinds, "step3p7", "Step3p7", "Step3p7TextConfig", STEP),
    "mimo": partial(of_both_kinds, "mimo_v2_flash", "MiMoV2Flash", "MiMoV2FlashConfig", MIMO),
    "dots3": partial(
        of_both_kinds, "dots3_note", "Dots3NoteText", "Dots3NoteTextConfig", DOTS3, True
    ),
}  # fmt: skip

if __name__ == "__main__":
    found = {}
    for name, run in RUNS.items():
        with torch.device("cpu" if name in LOOPS else "meta"):
            X = torch.randn(BATCH, SEQ, 64, dtype=torch.bfloat16, requires_grad=True)
            ONE = X[:1].detach().clone().requires_grad_()
            OPEN = torch.zeros(1, 1, SEQ, SEQ, dtype=torch.bfloat16)
            PLACES = torch.arange(SEQ)[None]
            CAUSAL = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()[None, None]
            found[name] = run()
    print(json.dumps(found))
