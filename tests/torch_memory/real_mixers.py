"""Mixers of the real transformers on a CPU: FLOP of torch's counter, and bytes that autograd saves.

    PYTHONPATH=.:.venv/titan python tests/torch_memory/real_mixers.py

Prints one JSON object a mixer. FLOP are those of transformers' own code in torch, forward, without
triangular solves, which the counter leaves out. For the bytes, the kernels that a GPU runs (short
convolution, delta rule, gated norm, scan) are stood in for by functions that save what those save:
fla 0.6 and mamba_ssm 2.2, which have none for a CPU.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.flop_counter import FlopCounterMode

BATCH, SEQ = 2, 4096
DELTA = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
    "intermediate_size": 96, "vocab_size": 128, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
DSA = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 256,
    "intermediate_size": 96, "vocab_size": 128, "n_routed_experts": 8, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
KIMI = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "kv_lora_rank": 32,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "linear_num_heads": 4,
    "linear_head_dim": 32, "linear_conv_kernel_dim": 4, "intermediate_size": 96,
    "vocab_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 32,
}  # fmt: skip
MAMBA = {
    "hidden_size": 64, "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96,
    "vocab_size": 128, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 32,
    "n_groups": 2, "conv_kernel": 4, "chunk_size": 64, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}  # fmt: skip

FALCON = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "mamba_d_ssm": 96, "mamba_n_heads": 6,
    "mamba_d_state": 32, "mamba_n_groups": 2, "mamba_chunk_size": 64,
}  # fmt: skip
JAMBA = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "num_experts": 4, "attn_layer_period": 2,
    "attn_layer_offset": 1, "mamba_dt_rank": 8, "mamba_d_state": 16, "num_experts_per_tok": 2,
}  # fmt: skip
MAMBA1 = {
    "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "time_step_rank": 8,
    "state_size": 16,
}  # fmt: skip
LFM = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128, "conv_L_cache": 7,
    "layer_types": ["conv", "conv", "full_attention"],
}  # fmt: skip
MINIMAX = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128, "num_local_experts": 4,
    "num_experts_per_tok": 2, "block_size": 64,
}  # fmt: skip
STEP = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "share_expert_dim": 32,
    "sliding_window": 512, "layer_types": ["full_attention", "sliding_attention"],
    "num_sliding_attention_heads": 6, "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
MIMO = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 48, "v_head_dim": 32, "vocab_size": 128,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "sliding_window": 512, "layer_types": ["full_attention", "sliding_attention"],
}  # fmt: skip
GEMMA4 = {
    "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 32, "num_global_key_value_heads": 2,
    "global_head_dim": 64, "attention_k_eq_v": True, "vocab_size": 128, "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0,
    "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip
GEMMA4_SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 24, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 32, "vocab_size": 128,
    "sliding_window": 512, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128,
    "num_kv_shared_layers": 12, "use_double_wide_mlp": True,
}  # fmt: skip
LONGCAT = {
    "hidden_size": 64, "num_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "vocab_size": 128, "n_routed_experts": 16,
    "zero_expert_num": 8, "moe_topk": 6, "head_dim": 16,
}  # fmt: skip
M3 = {
    "hidden_size": 64, "intermediate_size": 32, "dense_intermediate_size": 96,
    "shared_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128, "num_local_experts": 4,
    "num_experts_per_tok": 2, "rotary_dim": 16, "index_n_heads": 2, "index_head_dim": 16,
    "index_block_size": 64, "index_topk_blocks": 4,
    "layer_types": ["full_attention", "minimax_m3_sparse"],
}  # fmt: skip
V4 = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 32, "q_lora_rank": 48, "o_groups": 2, "o_lora_rank": 24, "index_n_heads": 2,
    "index_head_dim": 16, "index_topk": 256, "moe_intermediate_size": 32, "vocab_size": 128,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128, "layer_types": [
        "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
    ], "mlp_layer_types": ["hash_moe", "moe", "moe"],
}  # fmt: skip


def flops(run: Callable[[], object]) -> int:
    """FLOP of torch's counter."""
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


class Saved:
    """A tensor that autograd holds as long as the graph that saved it lives."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # an output that a node saves would keep its node


def saved_bytes(module: torch.nn.Module, run: Callable[[], object]) -> int:
    """Bytes of the storages that autograd saves, weights and buffers left out, each once."""
    held = [*module.parameters(), *module.buffers()]
    own = {one.untyped_storage().data_ptr() for one in held}
    found: WeakSet[Saved] = WeakSet()

    def pack(tensor: torch.Tensor) -> Saved:
        saved = Saved(tensor)
        found.add(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        out = run()
    storages = {one.tensor.untyped_storage().data_ptr(): one.tensor for one in found}
    del out
    return sum(
        tensor.untyped_storage().nbytes() for place, tensor in storages.items() if place not in own
    )


class Kept(torch.autograd.Function):
    """A kernel that returns one tensor and saves the others that it is given."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], source: Any, *saved: Any) -> Any:
        ctx.save_for_backward(*saved)
        return source.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError


def delta() -> dict[str, Any]:
    """Gated DeltaNet and gated attention of Qwen3-Next."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next import modeling_qwen3_next as code

    config = Qwen3NextConfig(**DELTA)
    config._attn_implementation = "sdpa"
    mixer = code.Qwen3NextGatedDeltaNet(config, 0).bfloat16()
    x = torch.randn(BATCH, SEQ, 64, dtype=torch.bfloat16, requires_grad=True)
    attention = code.Qwen3NextAttention(config, 3).bfloat16()
    rotary = code.Qwen3NextRotaryEmbedding(config)
    places = rotary(x, torch.arange(SEQ)[None])
    counted = {
        "flops": flops(lambda: mixer(x)),
        "attention_flops": flops(lambda: attention(x, places, None)),
    }

    def conv(states: Any, weight: Any, bias: Any = None, **more: object) -> Any:
        return Kept.apply(states.shape, states, states, weight)

    def rule(query: Any, key: Any, value: Any, g: Any, beta: Any, **more: object) -> Any:
        heads = value.shape[2]
        q, k, v = (one.contiguous().clone() for one in (query, key, value))
        rstd = [torch.empty(*one.shape[:3]) for one in (q, k)]
        inverse = torch.empty(*value.shape[:2], heads, 64, dtype=value.dtype)
        sums = torch.empty(*value.shape[:2], heads)
        kept = (q, rstd[0], k, rstd[1], v, sums, beta, inverse)
        return Kept.apply(value.shape, value, *kept), None

    class Norm(torch.nn.Module):
        def forward(self, states: Any, gate: Any) -> Any:
            return Kept.apply(states.shape, states, states, gate, torch.empty(states.shape[0]))

    code.causal_conv1d_fn, code.torch_chunk_gated_delta_rule = conv, rule
    mixer.norm = Norm()
    return {**counted, "saved": saved_bytes(mixer, lambda: mixer(x)), "config": DELTA}


def dsa() -> dict[str, Any]:
    """DeepSeek sparse attention of DeepSeek-V3.2."""
    from transformers import DeepseekV32Config
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as code

    config = DeepseekV32Config(**DSA)
    config._attn_implementation = "sdpa"
    mixer = code.DeepseekV32Attention(config, 0).bfloat16()
    x = torch.randn(BATCH, SEQ, 64, dtype=torch.bfloat16, requires_grad=True)
    turns = code.DeepseekV32RotaryEmbedding(config)(x, torch.arange(SEQ)[None])
    causal = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()[None, None]

    def run() -> object:
        return mixer(x, turns, causal)

    counted = {"flops": flops(run)}

    kernels = code.ALL_ATTENTION_FUNCTIONS

    def masked(module: object, q: Any, k: Any, v: Any, mask: Any, **more: object) -> Any:
        rows, bias = torch.empty(q.shape[:3]), torch.empty(mask.shape, dtype=q.dtype)
        return Kept.apply((BATCH, SEQ, 4, 32), q, q, k, v, bias, rows), None

    real, kernels["sdpa"] = kernels["sdpa"], masked
    saved = saved_bytes(mixer, run)
    kernels["sdpa"] = real
    return {**counted, "saved": saved, "config": DSA}


def kimi(full: bool = False) -> dict[str, Any]:
    """Kimi Delta Attention of Kimi Linear, or of Ling 3, whose gates are full."""
    from transformers import BailingHybridConfig, KimiLinearConfig
    from transformers.models.bailing_hybrid import modeling_bailing_hybrid as ling
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear

    code: Any = ling if full else kimi_linear
    given = {**KIMI, "head_dim": 32} if full else KIMI
    made = BailingHybridConfig(**given) if full else KimiLinearConfig(**given)
    named = "BailingHybridDeltaAttention" if full else "KimiLinearDeltaAttention"
    mixer = getattr(code, named)(made, 0).bfloat16()
    x = torch.randn(BATCH, SEQ, 64, dtype=torch.bfloat16, requires_grad=True)
    counted = {"flops": flops(lambda: mixer(x))}

    def conv(states: Any, weight: Any, bias: Any = None, **more: object) -> Any:
        return Kept.apply(states.shape, states, states, weight)

    def rule(query: Any, key: Any, value: Any, g: Any, beta: Any, **more: object) -> Any:
        q, k, v = (one.contiguous().clone() for one in (query, key, value))
        rstd = [torch.empty(*one.shape[:3]) for one in (q, k)]
        chunks = [torch.empty(*value.shape[:3], 64, dtype=value.dtype) for _ in range(2)]
        sums = torch.empty(value.shape)
        kept = (q, rstd[0], k, rstd[1], v, sums, g, beta, *chunks)
        return Kept.apply(value.shape, value, *kept), None

    class Norm(torch.nn.Module):
        def forward(self, states: Any, gate: Any) -> Any:
            rows = torch.empty(states.numel() // states.shape[-1])
            return Kept.apply(states.shape, states, states, gate, rows)

    code.causal_conv1d_fn, code.chunk_kimi_delta_attention = conv, rule
    mixer.o_norm = Norm()
    return {**counted, "saved": saved_bytes(mixer, lambda: mixer(x)), "config": given}


def mamba() -> dict[str, Any]:
    """Mamba-2 of Nemotron-H, whose scan in torch is of sums that no counter sees."""
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h import modeling_nemotron_h as code

    config = NemotronHConfig(**MAMBA)
    mixer = code.NemotronHMamba2Mixer(config, 0).bfloat16()
    x = torch.randn(BATCH, SEQ, 64, dtype=torch.bfloat16, requires_grad=True)
    width, groups = 8 * 16, 2

    def combined(projected: Any, *more: object, **named: Any) -> Any:
        scanned = projected.new_empty(BATCH, SEQ, width)
        rows, weight = torch.empty(BATCH * SEQ, groups), named["outproj_weight"]
        return Kept.apply((BATCH, SEQ, 64), projected, projected, scanned, rows, weight)

    code.mamba2_split_conv1d_scan_combined = combined
    return {"saved": saved_bytes(mixer, lambda: mixer(x)), "config": MAMBA}


def latent() -> dict[str, Any]:
    """Experts on a latent, of Nemotron 3 Super, which transformers runs in a loop."""
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h import modeling_nemotron_h as code

    config = {**MAMBA, "moe_latent_size": 16}
    block = code.NemotronHMoE(NemotronHConfig(**config)).bfloat16()
    x = torch.randn(BATCH, SEQ, 64, dtype=torch.bfloat16)
    return {"flops": flops(lambda: block(x)), "config": config}


def falcon() -> dict[str, Any]:
    """Mamba-2 of Falcon H1, which stands beside attention and has no norm."""
    from transformers import FalconH1Config
    from transformers.models.falcon_h1 import modeling_falcon_h1 as code

    mixer = code.FalconH1Mixer(FalconH1Config(**FALCON), 0).bfloat16()
    mixer.register_buffer("mup_vector", torch.ones(1, 1, 1, dtype=torch.bfloat16))
    x = torch.randn(BATCH, SEQ, 64, dtype=torch.bfloat16, requires_grad=True)

    def combined(projected: Any, *more: object, **named: Any) -> Any:
        scanned = projected.new_empty(BATCH, SEQ, 96)
        return Kept.apply(x.shape, projected, projected, scanned, named["outproj_weight"])

    code.mamba2_split_conv1d_scan_combined = combined
    return {"saved": saved_bytes(mixer, lambda: mixer(x)), "config": FALCON}


def jamba() -> dict[str, Any]:
    """Mamba of Jamba, whose kernels run one by one, and copy what is not laid out by channels."""
    from transformers import JambaConfig
    from transformers.models.jamba import modeling_jamba as code

    config = JambaConfig(**JAMBA)
    norm, code.JambaRMSNorm = code.JambaRMSNorm, lambda *sizes, **more: Norm()
    mixer = code.JambaMambaMixer(config, 0).bfloat16()
    code.JambaRMSNorm = norm
    x = torch.randn(BATCH, SEQ, 64, dtype=torch.bfloat16, requires_grad=True)

    def conv(states: Any, weight: Any, bias: Any = None, **more: object) -> Any:
        return Kept.apply(states.shape, states, states, weight).mT.contiguous().mT

    def scan(u: Any, delta: Any, a: Any, b: Any, c: Any, z: Any, **more: object) -> Any:
        copies = [one.contiguous() for one in (u, delta, b, c, z)]
        return Kept.apply(u.shape, u, *copies, u.new_empty(u.shape))

    code.causal_conv1d_fn, code.mamba_selective_scan = conv, scan
    return {
        "flops": flops(lambda: mixer(x)),
        "saved": saved_bytes(mixer, lambda: mixer(x)),
        "config": JAMBA,
    }


def mamba1() -> dict[str, Any]:
    """Mamba, the first, in the one function that its kernels have."""
    from transformers import MambaConfig
    from transformers.models.mamba import modeling_mamba as code

    mixer = code.MambaMixer(MambaConfig(**MAMBA1), 0).bfloat16().train()
    x = torch.randn(BATCH, SEQ, 64, dtype=torch.bfloat16, requires_grad=True)

    def inner(projected: Any, *more: object, **named: object) -> Any:
        low = projected.new_empty(BATCH, SEQ, 8 + 2 * 16)
        keys, out = projected.new_empty(BATCH, 2 * 16, SEQ), projected.new_empty(BATCH, 128, SEQ)
        return Kept.apply(x.shape, projected, projected, low, keys, out)

    code.mamba_inner_fn = inner
    return {"saved": saved_bytes(mixer, lambda: mixer(x)), "config": MAMBA1}


def lfm() -> dict[str, Any]:
    """Gated short convolution and attention with a gate a head, of LFM3."""
    from transformers import Lfm3Config
    from transformers.models.lfm3 import modeling_lfm3 as code

    config = Lfm3Config(**LFM)
    config._attn_implementation = "sdpa"
    mixer = code.Lfm3ShortConv(config, 0).bfloat16()
    attention = code.Lfm3Attention(config, 2).bfloat16()
    x = torch.randn(BATCH, SEQ, 64, dtype=torch.bfloat16, requires_grad=True)
    places = code.Lfm3RotaryEmbedding(config)(x, torch.arange(SEQ)[None], "full_attention")
    counted = {
        "flops": flops(lambda: mixer(x)),
        "attention_flops": flops(lambda: attention(x, places, None)),
    }

    def conv(states: Any, weight: Any, bias: Any = None, **more: object) -> Any:
        return Kept.apply(states.shape, states, states, weight)

    code.causal_conv1d_fn = conv
    return {**counted, "saved": saved_bytes(mixer, lambda: mixer(x)), "config": LFM}


def minimax() -> dict[str, Any]:
    """Lightning attention of MiniMax-01, in blocks of its own code, with a norm of one kernel."""
    from transformers import MiniMaxConfig
    from transformers.models.minimax import modeling_minimax as code

    mixer = code.MiniMaxLightningAttention(MiniMaxConfig(**MINIMAX), 1).bfloat16()
    x = torch.randn(BATCH, SEQ, 64, dtype=torch.bfloat16, requires_grad=True)

    class Norm(torch.nn.Module):
        def forward(self, states: Any) -> Any:
            return Kept.apply(states.shape, states, states, torch.empty(states.shape[:2]))

    counted = {"flops": flops(lambda: mixer(x, None, None))}
    mixer.norm = Norm()
    saved = saved_bytes(mixer, lambda: mixer(x, None, None))
    return {**counted, "saved": saved, "config": MINIMAX}


class Norm(torch.nn.Module):
    """A norm of one kernel, which saves its input and a number a row."""

    def forward(self, states: Any) -> Any:
        return Kept.apply(states.shape, states, states, torch.empty(states.shape[:-1]))


class Experts(torch.nn.Module):
    """Experts that save nothing but their scores."""

    def forward(self, states: Any, index: Any, scores: Any) -> Any:
        return Kept.apply(states.shape, states, scores)


def fused(module: object, q: Any, k: Any, v: Any, mask: Any, **more: object) -> Any:
    """Attention of one kernel, which saves queries, keys, values, output and a number a row."""
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
    held = (q, k, v, torch.empty(q.shape[:3]), *(() if mask is None else (mask,)))
    return Kept.apply(out.shape, q, *held), None


def attended(code: Any, attention: Any, run: Callable[[], object]) -> dict[str, int]:
    """FLOP of an attention of transformers without its core, and bytes that it saves.

    Its norms and its core are kernels.
    """
    for name in ("q_norm", "k_norm", "v_norm"):
        if hasattr(attention, name):
            setattr(attention, name, Norm())
    kernels = code.ALL_ATTENTION_FUNCTIONS
    real, kernels["sdpa"] = kernels["sdpa"], fused
    found = {"flops": flops(run), "saved": saved_bytes(attention, run)}
    kernels["sdpa"] = real
    return found


def turned(module: Any, places: Any) -> Any:
    """Rotary tables as buffers, which all layers share."""
    for name, table in zip(("cos", "sin"), places, strict=True):
        module.register_buffer(name, table)
    return module.cos, module.sin


def step() -> dict[str, Any]:
    """Attention of Step 3.5, whose windowed layers have other heads, with a gate a head."""
    from transformers.models.step3p7 import configuration_step3p7 as configs
    from transformers.models.step3p7 import modeling_step3p7 as code

    config = configs.Step3p7TextConfig(**STEP)
    config._attn_implementation = "sdpa"
    x = torch.randn(BATCH, SEQ, 64, dtype=torch.bfloat16, requires_grad=True)
    rotary = code.Step3p7RotaryEmbedding(config)
    found = {}
    for kind, layer in (("full", 0), ("windowed", 1)):
        attention = code.Step3p7DecoderLayer(config, layer).self_attn.bfloat16()
        places = rotary(x, torch.arange(SEQ)[None], config.layer_types[layer])
        run = partial(attention, x, turned(attention, places), None)
        found[kind] = attended(code, attention, run)
    return {**found, "config": STEP}


def mimo() -> dict[str, Any]:
    """Attention of MiMo-V2-Flash, whose windowed layers have more key heads, and sinks."""
    from transformers.models.mimo_v2_flash import configuration_mimo_v2_flash as configs
    from transformers.models.mimo_v2_flash import modeling_mimo_v2_flash as code

    config = configs.MiMoV2FlashConfig(**MIMO)
    config._attn_implementation = "sdpa"
    x = torch.randn(BATCH, SEQ, 64, dtype=torch.bfloat16, requires_grad=True)
    rotary = code.MiMoV2FlashRotaryEmbedding(config)
    found = {}
    for kind, layer in (("full", 0), ("windowed", 1)):
        attention = code.MiMoV2FlashAttention(config, layer).bfloat16()
        places = rotary(x, torch.arange(SEQ)[None], config.layer_types[layer])
        run = partial(attention, x, turned(attention, places), None)
        found[kind] = attended(code, attention, run)
    return {**found, "config": MIMO}


def gemma4() -> dict[str, Any]:
    """Attention of Gemma 4, and FLOP of its whole layers, with a dense MLP beside the experts."""
    from transformers import Gemma4TextConfig
    from transformers.models.gemma4 import modeling_gemma4 as code

    config = Gemma4TextConfig(**GEMMA4)
    config._attn_implementation = "sdpa"
    x = torch.randn(BATCH, SEQ, 64, dtype=torch.bfloat16, requires_grad=True)
    rotary = code.Gemma4TextRotaryEmbedding(config)
    found: dict[str, Any] = {}
    for kind, place in (("windowed", 0), ("full", 1)):
        layer = code.Gemma4TextDecoderLayer(config, place).bfloat16()
        places = rotary(x, torch.arange(SEQ)[None], config.layer_types[place])
        tables = turned(layer.self_attn, places)
        with torch.no_grad():
            whole = flops(partial(layer, x.detach(), None, {}, position_embeddings=tables))
        run = partial(layer.self_attn, x, tables, None, {})
        found[kind] = {**attended(code, layer.self_attn, run), "layer": whole}
        for name in [name for name, _ in layer.named_children() if name.endswith("layernorm")]:
            setattr(layer, name, Norm())
        for name in ("layernorm_1", "layernorm_2"):
            setattr(layer, f"post_feedforward_{name}", Norm())
        layer.pre_feedforward_layernorm_2 = layer.router.norm = Norm()
        layer.experts = Experts()
        run = partial(layer.train(), x, None, {}, position_embeddings=tables)
        found[kind]["rest"] = attended(code, layer, run)["saved"]
    return {**found, "config": GEMMA4}


def gemma4_small() -> dict[str, Any]:
    """Gemma 4 with per-layer embeddings and shared keys: each kind of layer, and all of them.

    The whole model saves bytes without recomputation, and with that of all layers.
    """
    from transformers import Gemma4TextConfig
    from transformers.models.gemma4 import modeling_gemma4 as code

    config = Gemma4TextConfig(**GEMMA4_SMALL)
    config._attn_implementation = "sdpa"
    x = torch.randn(BATCH, SEQ, 64, dtype=torch.bfloat16, requires_grad=True)
    rotary, norm = code.Gemma4TextRotaryEmbedding(config), code.Gemma4RMSNorm
    code.Gemma4RMSNorm = lambda *sizes, **more: Norm()
    found: dict[str, Any] = {}

    class Tables(torch.nn.Module):
        def forward(self, x: Any, places: Any, kind: str) -> Any:
            if kind not in dict(self.named_children()):
                self.add_module(kind, torch.nn.Module())
                turned(self.get_submodule(kind), rotary(x, torch.arange(SEQ)[None], kind))
            return self.get_submodule(kind).cos, self.get_submodule(kind).sin

    for kind, place in (("windowed", 0), ("full", 5), ("windowed-shared", 12), ("full-shared", 17)):
        layer = code.Gemma4TextDecoderLayer(config, place).bfloat16().train()
        named = config.layer_types[place]
        width = config.per_layer_config[place].head_dim
        part = torch.zeros(BATCH, SEQ, 8, dtype=torch.bfloat16)
        keys = torch.zeros(2, BATCH, 1, SEQ, width, dtype=torch.bfloat16).unbind()
        layer.part, layer.tables = torch.nn.Buffer(part), Tables()
        layer.keys, layer.values = map(torch.nn.Buffer, keys)
        places = layer.tables(x, None, named)
        layer.part.requires_grad_()
        shared = {named: (layer.keys, layer.values)}
        run = partial(layer, x, layer.part, shared, position_embeddings=places)
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
    from transformers import LongcatFlashConfig
    from transformers.models.longcat_flash import modeling_longcat_flash as code

    config = LongcatFlashConfig(**LONGCAT)
    config._attn_implementation = "sdpa"
    x = torch.randn(BATCH, SEQ, 64, dtype=torch.bfloat16, requires_grad=True)
    norm, code.LongcatFlashRMSNorm = code.LongcatFlashRMSNorm, lambda *sizes, **more: Norm()
    layer = code.LongcatFlashDecoderLayer(config, 0).bfloat16().train()
    code.LongcatFlashRMSNorm = norm
    places = code.LongcatFlashRotaryEmbedding(config)(x, torch.arange(SEQ)[None])
    tables = turned(layer, places)
    alike = torch.arange(BATCH * SEQ * 6).reshape(-1, 6) % 24
    layer.mlp.router.get_topk_indices = lambda scores: alike
    run = partial(layer, x, None, position_embeddings=tables)
    found = attended(code, layer, run)
    layer.mlp.experts = Experts()
    return {**found, "rest": attended(code, layer, run)["saved"], "config": LONGCAT}


def m3() -> dict[str, Any]:
    """MiniMax sparse attention of MiniMax M3, masked."""
    from transformers.models.minimax_m3_vl import configuration_minimax_m3_vl as configs
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as code

    config = configs.MiniMaxM3VLTextConfig(**M3)
    config._attn_implementation = "sdpa"
    x = torch.randn(BATCH, SEQ, 64, dtype=torch.bfloat16, requires_grad=True)
    places = code.MiniMaxM3VLRotaryEmbedding(config)(x, torch.arange(SEQ)[None])
    attention = code.MiniMaxM3VLAttention(config, 1).bfloat16()
    run = partial(attention, x, turned(attention, places), None)
    return {**attended(code, attention, run), "config": M3}


def v4() -> dict[str, Any]:
    """Attention of each kind of DeepSeek-V4's layers, its streams, and a whole checkpointed layer.

    core: of one sequence, eager; two: of two; else one kernel that saves queries, keys and a
    number a row.
    """
    from torch.utils.checkpoint import checkpoint
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as code

    config = DeepseekV4Config(**V4)
    config._attn_implementation = "eager"
    x = torch.randn(1, SEQ, 64, dtype=torch.bfloat16, requires_grad=True)
    mask, places = torch.zeros(1, 1, SEQ, SEQ, dtype=torch.bfloat16), torch.arange(SEQ)[None]
    rotary = code.DeepseekV4RotaryEmbedding(config)
    tables = {kind: rotary(x, places, kind) for kind in ("main", "compress")}
    kernels, found = code.ALL_ATTENTION_FUNCTIONS, {}
    streams = torch.randn(1, SEQ, 4, 64, dtype=torch.bfloat16, requires_grad=True)
    for index, kind in enumerate(("shared-kv", "csa", "hca")):
        attention = code.DeepseekV4Attention(config, index).bfloat16()
        run = partial(attention, x, tables, places, mask)
        found[kind] = {"flops": flops(run), "core": saved_bytes(attention, run)}
        two = torch.cat([x.detach()] * 2).requires_grad_(), tables, places, torch.cat([mask] * 2)
        found[kind]["two"] = saved_bytes(attention, partial(attention, *two))
        real, kernels["sdpa"] = kernels["sdpa"], lambda *of, **more: fused(*of[:4], None)
        config._attn_implementation = "sdpa"
        found[kind]["saved"] = saved_bytes(attention, run)
        kernels["sdpa"], config._attn_implementation = real, "eager"
        layer = code.DeepseekV4DecoderLayer(config, index).bfloat16()
        ids = torch.zeros(1, SEQ, dtype=torch.long)
        more = {"position_embeddings": tables, "position_ids": places, "attention_mask": mask}
        whole = partial(layer, streams, ids, **more)
        again = partial(checkpoint, layer, streams, ids, use_reentrant=False, **more)
        found[kind] |= {"layer": flops(whole), "full": saved_bytes(layer, again)}
    mixing, head = code.DeepseekV4HyperConnection(config), code.DeepseekV4HyperHead(config)

    def around() -> object:
        post, across, mixed = mixing(streams)
        kept = torch.matmul(across.bfloat16().transpose(-1, -2), streams)
        return mixed, post.bfloat16().unsqueeze(-1) * x.unsqueeze(-2) + kept

    found["streams"] = {"flops": flops(around), "saved": saved_bytes(mixing, around)}
    run = partial(head, streams)
    found["head"] = {"flops": flops(run), "saved": saved_bytes(head, run)}
    return {**found, "config": V4}


if __name__ == "__main__":
    runs = {
        "delta": delta,
        "mamba": mamba,
        "kimi": kimi,
        "ling": lambda: kimi(full=True),
        "latent": latent,
        "falcon": falcon,
        "jamba": jamba,
        "mamba1": mamba1,
        "lfm": lfm,
        "dsa": dsa,
        "minimax": minimax,
        "step": step,
        "gemma4": gemma4,
        "gemma4-small": gemma4_small,
        "mimo": mimo,
        "longcat": longcat,
        "m3": m3,
        "v4": v4,
    }
    print(json.dumps({name: run() for name, run in runs.items()}))
