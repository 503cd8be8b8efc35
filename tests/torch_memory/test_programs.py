"""Whole steps of the probe program on a rank of eight, from shapes alone: TP, pipelines, CP, HSDP,
tied tables, heads and losses.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from planner.estimates import estimate_job
from planner.probes.protocol import ProbeTask
from planner.probes.reference.collectives import RepeatedShard
from planner.probes.reference.recipe import ReferenceRecipe
from planner.probes.reference.step import Trainer
from tests.conftest import job_values
from tests.torch_memory.conftest import WORLD

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("no_workspace"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"dp_shard": 8}, "fsdp, accumulating": {"dp_shard": 8, "accumulate": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 4}, "tp": {"dp_shard": 4, "tp": 2},
    "tp 4, zero 2": {"dp_shard": 2, "tp": 4, "zero_stage": 2}, "cp": {"dp_shard": 4, "cp": 2},
    "pp": {"dp_shard": 4, "pp": 2, "accumulate": 4},
    "pp, resharding": {"dp_shard": 4, "pp": 2, "accumulate": 4, "zero_stage": 3},
    "pp and tp": {"dp_shard": 2, "pp": 2, "tp": 2, "accumulate": 4},
    "pp, GPipe": {"dp_shard": 2, "pp": 4, "accumulate": 4, "pp_schedule": "GPipe"},
    "pp, LoopedBFS": {"dp_shard": 4, "pp": 2, "accumulate": 4, "pp_schedule": "LoopedBFS",
        "virtual_stages": 2},
    "bf16 reduction": {"dp_shard": 8, "reduce_dtype": "bfloat16"},
}  # fmt: skip
# LoopedBFS's losses wait as GPipe's do. Its gradients come stage by stage, with the first backward
# of each, and the planner counts all with the very first: up to 21% more than wide models need.
# Off by up to 10%: layers that are resharded after forward stay gathered from backward to the next
# forward.
XFAIL = pytest.mark.xfail(strict=False)
DRAWN = list(itertools.product(LAYOUTS, range(2)))


def case(name: str, number: int) -> Any:
    """Without stages all ranks are alike: their second draw is left to the slow tier."""
    later = [pytest.mark.slow] * (number > 0 and "pp" not in name)
    return pytest.param(name, number, marks=[*[XFAIL] * ("resharding" in name), *later])


@pytest.fixture
def as_rank() -> Iterator[Callable[[int], None]]:
    """Makes this process another rank of the fake world for one test."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def become(rank: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        _clear_sharding_prop_cache()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)

    before = dist.is_initialized()
    yield become
    dist.destroy_process_group()
    if before:
        become(0)


def drawn(name: str, number: int) -> dict[str, Any]:
    """A job of this layout: narrow and wide, short and long, large and small vocabularies."""
    rng = random.Random(f"{name} {number}")
    layout = dict(LAYOUTS[name])
    heads, head_dim = rng.choice((4, 8)), rng.choice((64, 128))
    hidden = heads * head_dim
    batch, times = rng.choice((1, 2)), layout.pop("accumulate", 1)
    replicas = layout.get("dp_shard", 1) * layout.get("dp_replicate", 1)
    tp, pp = (layout.get(axis, 1) for axis in ("tp", "pp"))
    model = {
        "name": "generated", "hidden_size": hidden, "num_hidden_layers": rng.choice((4, 6)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads // rng.choice((1, 2)) if tp < 4 else heads,
        "head_dim": head_dim, "intermediate_size": hidden * rng.choice((2, 4)),
        "vocab_size": 1024 * rng.choice((1, 4, 8)),
        "tie_word_embeddings": tp * pp == 1 and rng.random() < 0.3,
    }  # fmt: skip
    seq = 1024 * rng.choice((1, 2))
    layout |= {"micro_batch_size": batch, "ac": rng.choice(("none", "full", "selective-op"))}
    given = {"layout": layout, "trainer": "torchtitan"}
    return job_values(model, "h100-sxm-80gb", WORLD, seq, batch * times * replicas, **given)


def both_peaks(job: dict[str, Any], rank: int) -> tuple[float, float]:
    """(bytes that the tracker saw, that the planner says) of a rank, without cuBLAS's workspace."""
    from planner.probes.reference.run import shapes_alone

    fake = {"device": "cpu", "emulate_rank": rank, "fake_tensors": True}
    task = ProbeTask(id="generated", job=job, **fake, steps=1)
    recipe = ReferenceRecipe.of(task)
    memory = estimate_job(recipe.task.parsed()).memory
    stage = memory.stages[rank * recipe.layout.pp // WORLD]
    return float(shapes_alone(recipe).peak), stage.peak_allocated_bytes - stage.workspace_bytes


@pytest.mark.parametrize(("name", "number"), [case(*one) for one in DRAWN])
def test_step(name: str, number: int, as_rank: Callable[[int], None]) -> None:
    job, rank = drawn(name, number), (0, WORLD - 1)[number % 2]
    as_rank(rank)
    seen, ours = both_peaks(job, rank)
    assert ours == pytest.approx(seen, rel=0.02), job


def test_a_gather_of_an_emulated_rank_is_two_copies(
    as_rank: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's fake process group it is one for every rank of the world."""
    as_rank(3)
    world, gathers = [], 0

    class Gathers(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            nonlocal gathers
            gathers += "c10d" in str(func) and "gather" in str(func)
            return func(*args, **(kwargs or {}))

    def gathered(self: RepeatedShard, *, output_tensor: Any, **given: Any) -> None:
        plain(self, output_tensor=output_tensor, **given)
        rows = output_tensor.view(given["group"].size(), -1)
        assert rows.equal(given["input_tensor"].expand_as(rows))
        world.append(len(rows))

    plain = RepeatedShard.__call__
    monkeypatch.setattr(RepeatedShard, "__call__", gathered)
    job = {**drawn("fsdp", 0), "cluster": {"gpu": "cpu", "num_gpus": WORLD}}
    job["training"] |= {"seq_len": 32, "trainer": "fsdp"}
    task = ProbeTask(id="one", job=job, device="cpu", emulate_rank=3)
    trainer = Trainer(ReferenceRecipe.of(task), torch.device("cpu"))
    trainer.materialise()
    with Gathers():
        trainer.step(0)
    assert set(world) == {WORLD}
    assert gathers == 0
