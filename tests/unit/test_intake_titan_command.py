"""TorchTitan's commands and scripts of both lines, read as a job and edited to another layout."""

import pytest
from current_cases import FOLDER, exported, job_of_text, machine, runnable, same_run
from export_cases import cluster, layout, model, training
from hypothesis import strategies as st

from planner.errors import SpecError
from planner.export.torchtitan import export
from planner.intake.current import read
from planner.intake.trainer_files.statement import Machine
from planner.intake.trainer_files.titan_changes import titan_changes
from planner.intake.trainer_files.titan_command import edited_command
from planner.intake.trainer_files.torchtitan import StatedTitan
from planner.specs.current import CurrentSpec
from planner.specs.layout import Layout
from planner.trainers.titan_defaults import CONFIGS_03
from tests.conftest import tiers

EIGHT = (FOLDER / "llama3_8b.toml").read_text(encoding="utf-8")
SLURM = (FOLDER / "train_slurm.sh").read_text(encoding="utf-8")
MODELS_03 = ("llama3-8b", "llama3-70b", "llama3.1-405b", "qwen3-30b-a3b", "deepseek-v3", "kimi-k2")


def edited(spec: CurrentSpec, winner: Layout, name: str, **more: object) -> dict[str, str]:
    stated = read(spec)
    assert isinstance(stated, StatedTitan)
    made = exported(winner, name, winner.num_gpus, "torchtitan", stated.version, **more)
    changes, _ = titan_changes(stated, winner, made)
    modules = {name: text for name, text in made.files.items() if name.endswith(".py")}
    return {**spec.files, **modules, **edited_command(spec, changes, stated.spelling, stated.line)}


def test_one_line_of_0_2_over_its_toml() -> None:
    line = (
        "NGPU=16 CONFIG_FILE=./llama3_8b.toml ./run_train.sh --training.local_batch_size 2 "
        "--parallelism.tensor-parallel-degree=4"
    )
    job = job_of_text("run.sh", line, {"./llama3_8b.toml": EIGHT})
    assert job.layout == layout(16, tp=4, micro_batch_size=2)
    assert (job.model.name, job.cluster.num_gpus) == ("llama3.1-8b", 16)
    assert job.cluster.gpus_per_node == 16
    assert job.training.global_batch_size == 2 * 4


def test_a_script_for_slurm_says_the_gpus() -> None:
    job = job_of_text("train_slurm.sh", SLURM, {"./llama3_8b.toml": EIGHT}, cluster={})
    cluster = job.cluster
    assert (cluster.gpu.name, cluster.num_gpus) == ("h100-sxm-80gb", 32)
    assert cluster.gpus_per_node == 8
    assert job.layout == layout(32, dp_replicate=2, tp=2, micro_batch_size=2, compile=True)


def test_one_line_of_0_3_takes_what_its_config_sets() -> None:
    job = job_of_text(
        "run.sh",
        "torchrun --nproc_per_node=8 --nnodes=8 -m torchtitan.train --module llama3 --config "
        "llama3_70b",
    )
    assert job.layout == layout(64, tp=8, micro_batch_size=8, ac="full")
    training = job.training
    assert (training.seq_len, training.global_batch_size) == (8192, 64)
    assert training.trainer_version == "0.3.0"


@pytest.mark.parametrize("config", sorted(CONFIGS_03))
def test_every_config_of_0_3_that_is_listed_has_a_model(config: str) -> None:
    module = CONFIGS_03[config][0]
    text = f"NGPU=8 MODULE={module} CONFIG={config} ./run_train.sh"
    stated = read(CurrentSpec(name="run.sh", text=text))
    assert stated.model.value is not None
    assert stated.machine == Machine(num_gpus=8, gpus_per_node=8)


def test_a_toml_that_is_not_there_is_named() -> None:
    with pytest.raises(SpecError, match=r"starts from ./gone\.toml, which is not there"):
        job_of_text("run.sh", "NGPU=8 CONFIG_FILE=./gone.toml ./run_train.sh")


def test_a_variable_that_nobody_sets_leaves_the_gpus_open() -> None:
    with pytest.raises(SpecError, match=r"cluster\.num_gpus"):
        job_of_text(
            "run.sh",
            "torchrun --nnodes $NODES --nproc_per_node 8 -m torchtitan.train --module llama3 "
            "--config llama3_8b",
        )


def test_a_value_changes_where_it_is_written_and_new_ones_go_to_the_toml() -> None:
    spec = CurrentSpec(name="train_slurm.sh", text=SLURM, files={"./llama3_8b.toml": EIGHT})
    files = edited(
        spec,
        layout(32, tp=4, ac="full", compile=False, micro_batch_size=4),
        "llama3-8b",
        global_batch_size=64,
    )
    before = SLURM.splitlines()
    changed = [line for line in files["train_slurm.sh"].splitlines() if line not in before]
    assert sorted(changed) == [
        "  --compile.no_enable \\",
        "  --parallelism.data_parallel_replicate_degree=1 \\",
        "  --training.local_batch_size 4 \\",
        "TP=4",
    ]
    assert 'mode = "full"' in files["llama3_8b.toml"]
    assert "global_batch_size = 64" in files["llama3_8b.toml"]


@tiers(8, 80, data=st.data())
def test_every_export_for_0_3_reads_back_from_its_script(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(MODELS_03))
    chosen = data.draw(runnable(name, "torchtitan", "0.3.0"))
    batch = 4 * chosen.micro_batch_size * chosen.dp_degree
    made = exported(chosen, name, chosen.num_gpus, "torchtitan", "0.3.0", global_batch_size=batch)
    job = job_of_text(
        "launch.sh",
        made.files["launch.sh"],
        made.files,
        cluster={
            "gpu": "h100-sxm-80gb",
            "gpus_per_node": machine(chosen.num_gpus)["gpus_per_node"],
        },
    )  # noqa: E501, RUF100
    assert job.layout is not None
    assert same_run(job.layout, chosen, job.model.num_hidden_layers, "torchtitan")
    assert job.cluster.num_gpus == chosen.num_gpus
    assert (job.training.global_batch_size, job.training.seq_len) == (batch, 8192)
    assert {**job.model.model_dump(), "name": ""} == {**model(name).model_dump(), "name": ""}


@tiers(6, 60, data=st.data(), line=st.sampled_from(["0.2.2", "0.3.0"]))
def test_an_edited_script_runs_the_new_layout(data: st.DataObject, line: str) -> None:
    first, winner = (data.draw(runnable("llama3-8b", "torchtitan", line)) for _ in range(2))
    winner = winner.model_copy(
        update={
            axis: getattr(first, axis) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp")
        }
    )
    made = exported(
        winner,
        "llama3-8b",
        winner.num_gpus,
        "torchtitan",
        line,
        global_batch_size=4 * winner.micro_batch_size * winner.dp_degree,
    )  # noqa: E501, RUF100
    if made.blockers:
        return
    batch = 4 * winner.micro_batch_size * winner.dp_degree * first.micro_batch_size
    before = exported(
        first, "llama3-8b", first.num_gpus, "torchtitan", line, global_batch_size=batch
    )
    text = before.files["launch.sh"].replace('  "$@"', '  --comm.init_timeout_seconds 7 \\\n  "$@"')
    spec = CurrentSpec(
        name="launch.sh",
        text=text,
        files={name: text for name, text in before.files.items() if name != "launch.sh"},
    )
    files = edited(spec, winner, "llama3-8b", global_batch_size=batch)
    job = job_of_text("launch.sh", files.get("launch.sh", text), files)
    assert job.layout is not None
    assert same_run(job.layout, winner, 32, "torchtitan")
    assert job.training.global_batch_size == batch
    assert "--comm.init_timeout_seconds 7" in files.get("launch.sh", text)


@pytest.mark.parametrize(("flags", "graphs"), [
    ("", None),
    ("--training.disable_cuda_graphs", "none"),
    # who must do without has not chosen to
    (
        "--parallelism.pipeline_parallel_degree 2 --training.local_batch_size 2"
        " --training.disable_cuda_graphs",
        None,
    ),
])  # fmt: skip
def test_cuda_graphs_of_0_3(flags: str, graphs: str | None) -> None:
    command = "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3"
    text = f"{command} --config llama3_8b {flags}"
    job = job_of_text("launch.sh", text, {}, cluster={"gpu": "h100-sxm-80gb", "num_gpus": 8})
    assert job.training.cuda_graphs == graphs
    assert job.training.chunked_loss is None


def test_pipelines_with_cuda_graphs_stop_0_3() -> None:
    text = (
        "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b"
        " --parallelism.pipeline_parallel_degree 2 --training.local_batch_size 2"
    )
    stated = read(CurrentSpec(name="launch.sh", text=text))
    assert isinstance(stated, StatedTitan)
    run = stated.run(model("llama3.1-8b"), 8)
    assert [fault.field for fault in run.refusals] == ["training.disable_cuda_graphs"]


def test_dispatchers_of_experts() -> None:
    text = (
        "torchrun --nproc_per_node 8 -m torchtitan.train --module deepseek_v3"
        " --config deepseek_v3_16b_hybridep"
    )
    job = job_of_text("launch.sh", text, {}, cluster={"gpu": "h100-sxm-80gb", "num_gpus": 8})
    assert (job.layout.moe_dispatcher, job.layout.ep) == ("hybridep", 8)


def test_the_loss_and_the_dispatcher_in_a_module() -> None:
    chosen = layout(
        8, ep=8, moe_dispatcher="deepep", precision="float8-rowwise-gw-hp", compile=True
    )
    made = export(
        chosen,
        model("deepseek-v2-lite"),
        cluster(8),
        training(chunked_loss=False, trainer_version="0.3.0"),
    )
    job = job_of_text(
        "launch.sh",
        made.files["launch.sh"],
        made.files,
        cluster={"gpu": "h100-sxm-80gb", "num_gpus": 8},
    )
    assert job.layout is not None
    assert (job.training.chunked_loss, job.layout) == (False, chosen)


def test_the_graph_trainer_is_read_as_a_program_of_its_own() -> None:
    text = (
        "torchrun --nproc_per_node 8 -m torchtitan.train --module graph_trainer.deepseek_v3"
        " --config graph_trainer_deepseek_v3_16b --compile.memory_policy full"
    )
    job = job_of_text("launch.sh", text, {}, cluster={"gpu": "h100-sxm-80gb", "num_gpus": 8})
    assert job.training.trainer_version == "0.3.0, graph_trainer"
    assert (job.layout.compile, job.layout.ac, job.layout.ep) == (True, "full", 8)
    made = export(job.layout, job.model, job.cluster, job.training)
    assert [fault.field for fault in made.blockers] == ["training.trainer_version"]
