"""A plan runs: its trainer can run the job, every layout is exported, asking for more is safe."""

import json
from typing import Any

import pytest

from benchmarks.runnable import Combination, examine, sample
from planner.errors import UnsupportedError
from planner.estimates import estimate_job
from planner.export import export
from planner.export.megatron import parse_back
from planner.intake.jobs import read_job, read_training
from planner.intake.machines import read_cluster
from planner.intake.models import read_model
from planner.plan.recommend import fewer_than_asked, recommend
from planner.rules import Context
from planner.rules.support import obstacles, trainers_that_can
from planner.search.one_size import search_size
from planner.specs.job import Job
from planner.specs.plan import Plan
from tests.conftest import fixed_ports, job_values
from tests.unit.test_rules import ROWS


def job(
    model: Any = "llama3-8b",
    gpu: str = "h100-sxm-80gb",
    num_gpus: int = 8,
    top_k: int = 10,
    **training: Any,
) -> Job:
    return read_job(job_values(model, gpu, num_gpus, 4096, 64, search={"top_k": top_k}, **training))


def plan(asked: Job) -> Plan:
    return recommend(asked, ports=fixed_ports())


def context(asked: Job) -> Context:
    return Context(model=asked.model, cluster=asked.cluster, training=asked.training)


@pytest.mark.parametrize(
    ("asked", "words", "could"),
    [
        (job(gpu="tpu-v5p", num_gpus=64), "TorchTitan does not run on tpu-v5p", ()),
        (job("gemma2-9b"), "TorchTitan 0.2 cannot train gemma2-9b, for lack of", ("fsdp",)),
        (
            job("gemma2-9b", trainer="megatron"),
            "Megatron-LM 0.19 cannot train gemma2-9b, for lack of",
            ("fsdp",),
        ),
        (job("gpt3-175b"), "TorchTitan 0.2 cannot train gpt3-175b", ("megatron 0.19", "fsdp")),
        (job(optimizer="muon"), "TorchTitan 0.2 has no optimizer muon", ("megatron 0.19", "fsdp")),
        (
            job(optimizer="adamw-bf16-states"),
            "has no optimizer",
            ("torchtitan 0.3.0", "megatron 0.19", "fsdp"),
        ),
        (
            job(attention_kernel="unfused"),
            "TorchTitan 0.2 has no setting for unfused attention, and on h100-sxm-80gb it attends "
            "with cudnn",
            ("megatron 0.19", "fsdp"),
        ),
    ],
)
def test_a_job_its_trainer_cannot_run_is_refused_before_the_search(
    asked: Job, words: str, could: tuple[str, ...]
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        plan(asked)
    error = caught.value
    assert words in str(error)
    assert error.could == could
    assert all(
        name.partition(" ")[0] in error.remedy
        for name in could
        if not name.startswith(asked.training.trainer)
    )
    assert json.loads(json.dumps(error.as_dict()))["type"] == "nothing_runs"


def test_what_nobody_we_know_trains_on_is_said() -> None:
    with pytest.raises(UnsupportedError) as caught:
        plan(job(gpu="tpu-v5p", num_gpus=64))
    assert caught.value.remedy == "no trainer we know trains on tpu-v5p; MaxText could"


def test_nobody_is_sent_to_a_trainer_that_cannot() -> None:
    for name in ("gemma3-4b", "llama3-8b", "gpt-oss-20b", "deepseek-v3", "gpt3-175b"):
        asked = job(name)
        for one in trainers_that_can(asked.model, asked.cluster, asked.training):
            changed = {"trainer": one.trainer, "trainer_version": one.version}
            other = asked.training.model_copy(update=changed)
            context = Context(model=asked.model, cluster=asked.cluster, training=other)
            assert obstacles(context) == []


def test_a_later_release_of_ones_own_trainer_is_the_first_remedy() -> None:
    asked = job("minimax-m3", num_gpus=512, trainer="megatron-bridge")
    context = Context(model=asked.model, cluster=asked.cluster, training=asked.training)
    (found,) = obstacles(context)
    assert found.rule.startswith("Megatron-Bridge 0.6 cannot train minimax-m3")
    assert found.remedy.startswith("set training.trainer_version to 0.7; or use --trainer fsdp")
    able = trainers_that_can(asked.model, asked.cluster, asked.training)
    assert [(one.trainer, one.version) for one in able] == [
        ("megatron-bridge", "0.7"), ("fsdp", None)
    ]  # fmt: skip


@pytest.mark.parametrize(("trainer", "optimizer"), [("megatron", "adamw"), ("fsdp", "muon")])
def test_a_mode_of_muon_is_megatrons_own(trainer: str, optimizer: str) -> None:
    training = {"trainer": trainer, "optimizer": optimizer, "muon_tp_mode": "distributed"}
    asked = job(**training)
    context = Context(model=asked.model, cluster=asked.cluster, training=asked.training)
    assert [one.field for one in obstacles(context)] == ["training.muon_tp_mode"]


@pytest.mark.parametrize(("trainer", "version", "found"), [
    ("megatron", "0.16", []), ("megatron-bridge", "0.6", []),
    ("megatron", "0.15", ["training.qk_clip"]), ("torchtitan", None, ["training.qk_clip"]),
])  # fmt: skip
def test_who_scales_weights_of_queries_and_keys(
    trainer: str, version: str | None, found: list[str]
) -> None:
    asked = job(trainer=trainer, trainer_version=version, qk_clip=True)
    context = Context(model=asked.model, cluster=asked.cluster, training=asked.training)
    assert [one.field for one in obstacles(context)] == found


@pytest.mark.parametrize("kernel", ["flash2", "flash3", "flash", "cudnn"])
def test_scores_come_from_kernels_that_give_them(kernel: str) -> None:
    asked = job(trainer="megatron", qk_clip=True, attention_kernel=kernel)
    context = Context(model=asked.model, cluster=asked.cluster, training=asked.training)
    refused = ["training.attention_kernel"] if kernel in ("flash2", "flash3") else []
    assert [one.field for one in obstacles(context)] == refused


def test_an_estimate_prices_it_and_says_so() -> None:
    asked = job("gemma2-9b")
    priced = estimate_job(read_job({**asked.request, "layout": {}}))
    assert priced.valid
    assert priced.step_seconds
    assert [one.field for one in priced.unsupported] == ["model"]
    assert estimate_job(read_job({**job().request, "layout": {}})).unsupported == []


def test_every_measured_row_is_supported() -> None:
    for row in ROWS:
        asked = read_job(row)
        assert obstacles(context(asked)) == [], row["id"]


def test_amd_runs_megatron_through_its_fork() -> None:
    asked = job(gpu="mi300x-192gb", trainer="megatron", top_k=1)
    found = plan(asked)
    assert any("fork ROCm/Megatron-LM" in text for text in found.warnings)
    assert any("ROCm/Megatron-LM" in note for note in found.ranked[0].export["megatron"]["notes"])


def test_an_unknown_release_is_said_in_the_plan() -> None:
    assert any(
        "'0.2.3' is no release of torchtitan" in text
        for text in plan(job(top_k=1, trainer_version="0.2.3")).warnings
    )


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
    c = Context(
        model=read_model("llama3.1-405b"),
        cluster=read_cluster({"gpu": "h100-sxm-80gb", "num_gpus": num_gpus}),
        training=read_training(
            {"seq_len": 8192, "global_batch_size": 2 * num_gpus, "trainer": "megatron"}
        ),
    )
    pipelined = [layout for layout in sample(c, 40, 0) if layout.pp > 2]
    assert {layout.pp for layout in pipelined} >= {4, 8, 16}
    for layout in pipelined:
        written = export(layout, c.model, c.cluster, c.training, to="megatron")
        assert written.blockers == ()
        assert parse_back(written).layers_per_stage == layout.layers_per_stage
        said = " ".join(written.arguments)
        flags = ("--account-for-loss-in-pipeline-split", "--pipeline-model-parallel-layout")
        assert sum(flag in said for flag in flags) == 1


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
    one = Combination("llama3-8b", "l4", "torchtitan", "0.2.2", 8)
    assert one.seed() == Combination("llama3-8b", "l4", "torchtitan", "0.2.2", 8).seed()
    assert sample(one.context(), 3, one.seed()) == sample(one.context(), 3, one.seed())
