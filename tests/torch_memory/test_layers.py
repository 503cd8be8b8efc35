"""One transformer layer of every kind: what autograd keeps of it, exact to the byte, and what its
backward needs, within 2%.
"""

import random
from dataclasses import replace

import pytest

from tests.conftest import slow
from tests.torch_memory.modules import Block, Sizes
from tests.torch_memory.tracking import RANDOM_STATE_BYTES, on_meta, planned_layer

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_workspace")]

KINDS = {
    "llama": Sizes(), "llama, keys and values repeated": Sizes(repeat_kv=True),
    "llama, composite norms": Sizes(norm="composite"), "llama, rotate_half": Sizes(rotary="half"),
    "gpt": Sizes(norm="layer", mlp="gelu", rotary="none"),
    "nemotron": Sizes(norm="layer", mlp="squared-relu"),
    "latent attention": Sizes(kv_rank=64, qk_rope=16),
    "experts": Sizes(experts=4, top_k=2, expert_ffn=96),
    "latent attention, experts": Sizes(kv_rank=64, q_rank=96, qk_rope=16, experts=4, top_k=2,
        expert_ffn=96, shared_ffn=96),
}  # fmt: skip
MODES = ("none", "full", "selective-op", "selective-layer-2")


def drawn(kind: str, number: int) -> Sizes:
    """Sizes of real proportions and beyond: wide, narrow, long, short, few and many heads."""
    rng = random.Random(f"{kind} {number}")
    base = KINDS[kind]
    heads = rng.choice((2, 4, 8, 16))
    head_dim = rng.choice((32, 64, 128))
    hidden = heads * head_dim * rng.choice((1, 2, 4)) // 2
    grouped = not base.kv_rank and base.norm != "layer"
    sizes = replace(
        base, hidden=hidden, heads=heads,
        kv_heads=heads // rng.choice((1, 2, 4) if heads > 2 else (1, 2)) if grouped else heads,
        head_dim=head_dim, ffn=32 * rng.randint(hidden // 32, hidden // 8),
        seq=16 * rng.randint(1, 64), batch=rng.randint(1, 4), layers=2,
    )  # fmt: skip
    if base.kv_rank:
        sizes = replace(sizes, kv_rank=16 * rng.randint(1, 16), qk_rope=32)
        sizes = replace(sizes, q_rank=16 * rng.randint(1, 16) if base.q_rank else 0)
    if base.experts:
        top_k = rng.randint(1, 4)
        experts, expert_ffn = rng.choice((4, 8, 32)), 32 * rng.randint(1, 16)
        sizes = replace(sizes, experts=experts, top_k=top_k, expert_ffn=expert_ffn)
        sizes = replace(sizes, shared_ffn=32 * rng.randint(1, 16) if base.shared_ffn else 0)
    return sizes


@pytest.mark.parametrize("number", [0, 5, *slow(*range(1, 5))])
@pytest.mark.parametrize("ac", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_layer(kind: str, ac: str, number: int) -> None:
    sizes = drawn(kind, number)
    dtype = "float32" if number == 5 and "experts" not in kind else "bfloat16"
    if dtype == "float32":
        sizes = replace(sizes, norm="rms" if sizes.norm == "composite" else sizes.norm)
    seen = on_meta(sizes, Block, dtype, ac)
    saved, transient = planned_layer(sizes, ac=ac, param_dtype=dtype)
    state = RANDOM_STATE_BYTES["cudnn" if sizes.kv_rank else "flash"]
    attentions = {"full": 0.0, "selective-layer-2": 0.5}.get(ac, 1.0)
    # Nothing keeps the last output where norms are composite and not recomputed; it is alive here
    # as the stack's result.
    alive = sizes.norm == "composite" and ac in ("none", "selective-layer-2")
    apart = alive * sizes.tokens * sizes.hidden * 2.0
    assert saved == (sum(seen.kept) - apart) / sizes.layers - state * attentions
    peak = sum(seen.kept) + seen.extra
    assert sizes.layers * saved + apart + transient == pytest.approx(peak, rel=0.02)
