"""A plan runs: its trainer can run the job, every layout is exported, asking for more is safe."""

import json
from typing import Any

import pytest

from benchmarks.runnable import Combination, examine, sample
from planner.errors import UnsupportedError
from planner.estimates import estimate_job
from planner.export import export
from planner.export.megatron import parse_back
from planner.intake.jobs import read_job
from planner.plan.recommend import fewer_than_asked, recommend
from planner.rules import Context
from planner.rules.support import obstacles, trainers_that_can
from planner.search.one_size import search_size
from planner.specs.job import Job
from planner.specs.plan import Plan
from tests.conftest import fixed_now, job_values
from tests.golden.rows import published


def job(
    model: Any = "llama3-8b", gpu: str = "h100-sxm-80gb", num_gpus: int = 8, top_k: int = 10,
    **training: Any,
) -> Job:  # fmt: skip
    return read_job(job_values(model, gpu, num_gpus, 4096, 64, search={"top_k": top_k}, **training))


def plan(asked: Job) -> Plan:
    return recommend(asked, now=fixed_now)


def context(asked: Job) -> Context:
    return Context(model=asked.model, cluster=asked.cluster, training=asked.training)


def faulty(asked: Job) -> list[str]:
    return [one.field for one in obstacles(context(asked))]


@pytest.mark.parametrize(("asked", "words", "could"), [
    (job(gpu="tpu-v5p", num_gpus=64), "TorchTitan does not run on tpu-v5p", ()),
    (job("gemma2-9b"), "TorchTitan 0.2 cannot train gemma2-9b, for lack of", ("fsdp",)),
    (job("gemma2-9b", trainer="megatron"),
        "Megatron-LM 0.19 cannot train gemma2-9b, for lack of", ("fsdp",)),
    (job("gpt3-175b"), "TorchTitan 0.2 cannot train gpt3-175b", ("megatron 0.19", "fsdp")),
    (job(optimizer="muon"), "TorchTitan 0.2 has no optimizer muon", ("megatron 0.19", "fsdp")),
    (job(optimizer="adamw-bf16-states"), "has no optimizer",
        ("torchtitan 0.3.0", "megatron 0.19", "fsdp")),
    (job(attention_kernel="unfused"),
        "TorchTitan 0.2 has no setting for unfused attention, and on h100-sxm-80gb it attends "
        "with cudnn", ("megatron 0.19", "fsdp")),
])  # fmt: skip
def test_a_job_its_trainer_cannot_run_is_refused_before_the_search(
    asked: Job, words: str, could: tuple[str, ...]
) -> None:
    with pytest.raises(UnsupportedError, match=words) as caught:
        plan(asked)
    error = caught.value
    assert error.could == could
    others = [name for name in could if not name.startswith(asked.training.trainer)]
    assert all(name.partition(" ")[0] in error.remedy for name in others)
    assert json.loads(json.dumps(error.as_dict()))["type"] == "nothing_runs"
    nobody = "no trainer we know trains on tpu-v5p; MaxText could"
    assert (error.remedy == nobody) is (could == ())


def test_nobody_is_sent_to_a_trainer_that_cannot() -> None:
    for name in ("gemma3-4b", "llama3-8b", "gpt-oss-20b", "deepseek-v3", "gpt3-175b"):
        asked = job(name)
        for one in trainers_that_can(asked.model, asked.cluster, asked.training):
            other = {"trainer": one.trainer, "trainer_version": one.version}
            assert faulty(job(name, **other)) == []


def test_a_later_release_of_ones_own_trainer_is_the_first_remedy() -> None:
    asked = job("minimax-m3", num_gpus=512, trainer="megatron-bridge")
    (found,) = obstacles(context(asked))
    assert found.rule.startswith("Megatron-Bridge 0.6 cannot train minimax-m3")
    assert found.remedy.startswith("set training.trainer_version to 0.7; or use --trainer fsdp")
    able = trainers_that_can(asked.model, asked.cluster, asked.training)
    found_able = [(one.trainer, one.version) for one in able]
    assert found_able == [("megatron-bridge", "0.7"), ("fsdp", None)]


MUON, CLIP, KERNEL = "muon_tp_mode", "qk_clip", "attention_kernel"
CAPACITY, LOAD, EXPERTS = "moe_capacity_factor", "moe_imbalance", "mixtral-8x7b"


@pytest.mark.parametrize(("training", "fields"), [
    # a mode of Muon is Megatron's own
    ({"trainer": "megatron", "optimizer": "adamw", MUON: "distributed"}, [MUON]),
    ({"trainer": "fsdp", "optimizer": "muon", MUON: "distributed"}, [MUON]),
    # who scales weights of queries and keys, by scores from kernels that give them
    ({"trainer": "megatron", "trainer_version": "0.16", CLIP: True}, []),
    ({"trainer": "megatron-bridge", "trainer_version": "0.6", CLIP: True}, []),
    ({"trainer": "megatron", "trainer_version": "0.15", CLIP: True}, [CLIP]),
    ({"trainer": "torchtitan", CLIP: True}, [CLIP]),
    *(({"trainer": "megatron", CLIP: True, KERNEL: name}, []) for name in ("flash", "cudnn")),
    *(({"trainer": "megatron", CLIP: True, KERNEL: name}, [KERNEL])
        for name in ("flash2", "flash3")),
    # who gives each expert just its capacity, which leaves no other load
    *(({"trainer": "megatron", "model": EXPERTS, "trainer_version": version, CAPACITY: 1.25}, none)
        for version, none in (("0.7", []), ("0.6", [CAPACITY]))),
    *(({"trainer": name, "model": EXPERTS, CAPACITY: 1.25}, [CAPACITY])
        for name in ("torchtitan", "fsdp", "megatron-deepspeed")),
    ({"trainer": "megatron-bridge", "model": EXPERTS, CAPACITY: 1.0, LOAD: 1.5}, [LOAD]),
    ({"trainer": "megatron", CAPACITY: 1.0}, [CAPACITY]),
])  # fmt: skip
def test_what_only_some_trainers_and_kernels_have(training: dict, fields: list[str]) -> None:
    assert faulty(job(**training)) == [f"training.{field}" for field in fields]


def test_an_estimate_prices_it_and_says_so() -> None:
    priced, other = (
        estimate_job(read_job({**job(name).request, "layout": {}}))
        for name in ("gemma2-9b", "llama3-8b")
    )
    assert (priced.valid, priced.step_seconds > 0) == (True, True)
    assert [one.field for one in priced.unsupported] == ["model"]
    assert other.unsupported == []


def test_every_measured_row_is_supported() -> None:
    rows = published().items()
    assert {name: fields for name, row in rows if (fields := faulty(read_job(row)))} == {}


def test_amd_runs_megatron_through_its_fork() -> None:
    found = plan(job(gpu="mi300x-192gb", trainer="megatron", top_k=1))
    assert any("fork ROCm/Megatron-LM" in text for text in found.warnings)
    assert any("ROCm/Megatron-LM" in note for note in found.ranked[0].export["megatron"]["notes"])


def test_an_unknown_release_is_said_in_the_plan() -> None:
    warnings = plan(job(top_k=1, trainer_version="0.2.3")).warnings
    assert any("'0.2.3' is no release of torchtitan" in text for text in warnings)


@pytest.mark.parametrize(
    "asked", [("gpt-oss-20b", {}), ("llama3-8b", {"trainer": "megatron"})], ids=str
)
def test_the_winner_is_the_same_whatever_is_asked_for(asked: tuple[str, dict[str, Any]]) -> None:
    model, training = asked
    winners = {plan(job(model, top_k=count, **training)).ranked[0].layout for count in (1, 3, 10)}
    assert len(winners) == 1


@pytest.mark.slow
def test_all_that_is_ranked_runs() -> None:
    jobs = (job("gpt-oss-20b"), job("llama3-8b", "rtx-4090"))
    for asked in (*jobs, job("qwen3-8b", trainer_version="0.3.0")):
        for entry in plan(asked).ranked:
            assert entry.export["torchtitan"]["blockers"] == []


@pytest.mark.parametrize("num_gpus", [256, 16384])
def test_405b_is_split_over_megatrons_pipelines(num_gpus: int) -> None:
    """126 layers: 128 with embedding and loss, on 4 to 64 stages; a string for other numbers."""
    values = ("llama3.1-405b", "h100-sxm-80gb", num_gpus, 8192, 2 * num_gpus)
    c = context(read_job(job_values(*values, trainer="megatron")))
    pipelined = [layout for layout in sample(c, 40, 0) if layout.pp > 2]
    assert {layout.pp for layout in pipelined} >= {4, 8, 16}
    for layout in pipelined:
        written = export(layout, c.model, c.cluster, c.training, to="megatron")
        assert written.blockers == ()
        assert parse_back(written).layers_per_stage == layout.layers_per_stage
        flags = {"--account-for-loss-in-pipeline-split", "--pipeline-model-parallel-layout"}
        assert len(flags & {*written.arguments}) == 1


def test_fewer_than_asked_for_has_a_reason() -> None:
    asked = job("llama3-8b", "l4", 4, seq_len=2048)
    at_size = search_size(asked, asked.cluster, lambda _: None)
    (sentence,) = fewer_than_asked(10, 4, [at_size])
    assert sentence.startswith("4 of the 10 layouts asked for: ")
    assert "rejected: " in sentence
    assert fewer_than_asked(3, 3, [at_size]) == []


@pytest.mark.slow
def test_a_slice_of_every_combination_is_exported() -> None:
    gpus = ("h100-sxm-80gb", "l4", "b200-sxm-180gb", "mi300x-192gb", "tpu-v5p")
    for model in ("llama3.2-1b", "gpt-oss-20b", "gemma2-2b", "mixtral-8x7b"):
        found = examine(model, gpus, 2)
        assert sum(found.combinations.values()) == len(gpus) * 9
        assert found.blocked == []
        assert model.startswith("gemma") or sum(found.layouts.values()) > 40


def test_combinations_are_the_same_in_every_process() -> None:
    one, same = (Combination("llama3-8b", "l4", "torchtitan", "0.2.2", 8) for _ in range(2))
    assert one.seed() == same.seed()
    assert sample(one.context(), 3, one.seed()) == sample(one.context(), 3, one.seed())
