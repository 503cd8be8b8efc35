"""For any small job and any choice of values, the space is the set of legal layouts, each once."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.rules import violations
from planner.search.space.domains import domains_of
from planner.search.space.enumerate import build_space, enumerate_space
from planner.specs.job import SearchSpec
from planner.trainers.registry import TRAINERS

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from space_twin import TINY, TINY_MOE, brute_force, context, narrowed, rows_of

MAX_PRODUCT = 100_000


@st.composite
def jobs(draw: st.DrawFn) -> Any:
    """A tiny model with odd shapes, on a few GPUs, under some trainer."""
    heads = draw(st.sampled_from([4, 6, 8]))
    shape = {
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([heads, heads // 2])),
        "num_hidden_layers": draw(st.integers(1, 9)),
        "intermediate_size": draw(st.sampled_from([768, 770])),
    }
    model = {**draw(st.sampled_from([TINY, TINY_MOE])), **shape}
    drawn = {
        "gpu": ["h100-sxm-80gb", "a100-sxm-80gb", "b200-sxm-180gb", "v100-sxm-32gb"],
        "num_gpus": [1, 2, 4, 6, 8, 12], "trainer": sorted(TRAINERS),
        "seq_len": [512, 516, 1000, 777], "global_batch_size": range(1, 25),
        "attention_kernel": ["flash", "unfused"], "max_grad_norm": [1.0, None],
    }  # fmt: skip
    return context(model, **{name: draw(st.sampled_from(of)) for name, of in drawn.items()})


@st.composite
def cases(draw: st.DrawFn) -> Any:
    """A job with its domains narrowed, in their order, until the brute force is small."""
    c = draw(jobs())
    domains = domains_of(c, SearchSpec())
    values = {name: domain.values for name, domain in domains.by_field.items()}
    while np.prod([float(len(v)) for v in values.values()]) > MAX_PRODUCT:
        several = (name for name, v in values.items() if len(v) > 1 and name != "dp_shard")
        name = draw(st.sampled_from(sorted(several)))
        out = draw(st.integers(0, len(values[name]) - 1))
        values[name] = values[name][:out] + values[name][out + 1 :]
    return c, narrowed(domains, values)


@settings(max_examples=60)
@given(cases())
def test_the_space_is_the_brute_force_set(case: Any) -> None:
    c, domains = case
    space = enumerate_space(c, domains)
    found = rows_of(space.expand(slice(None)))
    assert len(found) == len(set(found)) == space.num_layouts
    assert set(found) == set(rows_of(brute_force(c, domains)))


@settings(max_examples=30)
@given(jobs(), st.integers(0, 2**32))
def test_any_layout_of_the_space_is_legal_on_its_own_and_can_be_fixed(c: Any, pick: int) -> None:
    space = build_space(c)
    if space.num_layouts == 0:
        assert space.rejected
        return
    batch = space.expand([pick % len(space.cells)])
    layout = batch.row(pick % len(batch))
    assert violations(layout, c.model, c.cluster, c.training) == []
    fixed = build_space(c, SearchSpec(fix=layout.model_dump()))
    assert fixed.num_layouts == 1
    assert fixed.cells.row(0) == layout
