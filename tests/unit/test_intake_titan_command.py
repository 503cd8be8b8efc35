"""TorchTitan's commands and scripts of both lines, read as a job and edited to another layout."""

import pytest
from current_cases import AXES, FOLDER, exported, job_of_text, machine, runnable, same_run
from export_cases import MODELS, cluster, layout, model, to_titan, training
from hypothesis import strategies as st

from planner.errors import SpecError
from planner.intake.current import read
from planner.intake.trainer_files.statement import Machine
from planner.intake.trainer_files.titan_changes import titan_changes
from planner.intake.trainer_files.titan_command import edited_command
from planner.specs.job import CurrentSpec
from planner.specs.layout import Layout
from planner.trainers.titan_settings import configs_03
from tests.conftest import tiers

EIGHT = (FOLDER / "llama3_8b.toml").read_text(encoding="utf-8")
SLURM = (FOLDER / "train_slurm.sh").read_text(encoding="utf-8")
SHAPES = tuple(name for name in MODELS if name != "gpt3-175b")  # which TorchTitan has no class for
MODELS_03 = ("llama3-8b", "llama3-70b", "llama3.1-405b", "qwen3-30b-a3b", "deepseek-v3", "kimi-k2")
H100 = {"gpu": "h100-sxm-80gb", "num_gpus": 8}
RUN = "torchrun --nproc_per_node 8 -m torchtitan.train --module"
PP2 = "--parallelism.pipeline_parallel_degree 2 --training.local_batch_size 2"


def edited(spec: CurrentSpec, winner: Layout, name: str, batch: int) -> dict[str, str]:
    stated = read(spec)
    made = exported(winner, name, "torchtitan", stated.version, batch)
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
    machines = (job.cluster.num_gpus, job.cluster.gpus_per_node)
    assert (job.model.name, *machines) == ("llama3.1-8b", 16, 16)
    assert job.training.global_batch_size == 2 * 4


def test_a_script_for_slurm_says_the_gpus() -> None:
    job = job_of_text("train_slurm.sh", SLURM, {"./llama3_8b.toml": EIGHT}, cluster={})
    gpus = job.cluster
    assert (gpus.gpu.name, gpus.num_gpus, gpus.gpus_per_node) == ("h100-sxm-80gb", 32, 8)
    assert job.layout == layout(32, dp_replicate=2, tp=2, micro_batch_size=2, compile=True)


def test_one_line_of_0_3_takes_what_its_config_sets() -> None:
    line = RUN.replace("-m", "--nnodes=8 -m", 1)
    job = job_of_text("run.sh", f"{line} llama3 --config llama3_70b")
    assert job.layout == layout(64, tp=8, micro_batch_size=8, ac="full")
    training = job.training
    assert (training.seq_len, training.global_batch_size) == (8192, 64)
    assert training.trainer_version == "0.3.0"


@pytest.mark.parametrize("config", sorted(configs_03()))
def test_every_config_of_0_3_that_is_listed_has_a_model(config: str) -> None:
    module = configs_03()[config].module
    text = f"NGPU=8 MODULE={module} CONFIG={config} ./run_train.sh"
    stated = read(CurrentSpec(name="run.sh", text=text))
    assert stated.model.value is not None
    assert stated.machine == Machine(num_gpus=8, gpus_per_node=8)


@pytest.mark.parametrize(("line", "words"), [
    ("NGPU=8 CONFIG_FILE=./gone.toml ./run_train.sh",
        r"starts from ./gone\.toml, which is not there"),
    (RUN.replace("-m", "--nnodes $NODES -m", 1) + " llama3 --config llama3_8b",
        r"cluster\.num_gpus"),  # nobody sets the variable
])  # fmt: skip
def test_what_a_line_leaves_open_is_named(line: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        job_of_text("run.sh", line)


def test_a_value_changes_where_it_is_written_and_new_ones_go_to_the_toml() -> None:
    spec = CurrentSpec(name="train_slurm.sh", text=SLURM, files={"./llama3_8b.toml": EIGHT})
    winner = layout(32, tp=4, ac="full", compile=False, micro_batch_size=4)
    files = edited(spec, winner, "llama3-8b", 64)
    assert sorted({*files["train_slurm.sh"].splitlines()} - {*SLURM.splitlines()}) == [
        "  --compile.no_enable \\", "  --parallelism.data_parallel_replicate_degree=1 \\",
        "  --training.local_batch_size 4 \\", "TP=4",
    ]  # fmt: skip
    assert 'mode = "full"' in files["llama3_8b.toml"]
    assert "global_batch_size = 64" in files["llama3_8b.toml"]


@tiers(20, 200, data=st.data(), line=st.sampled_from(["0.2.2", "0.3.0"]))
def test_every_export_reads_back_from_its_script(data: st.DataObject, line: str) -> None:
    name = data.draw(st.sampled_from(MODELS_03 if line == "0.3.0" else SHAPES))
    chosen = data.draw(runnable(name, "torchtitan", line))
    batch = 4 * chosen.micro_batch_size * chosen.dp_degree
    files = exported(chosen, name, "torchtitan", line, batch).files
    nodes = {"gpu": "h100-sxm-80gb", "gpus_per_node": machine(chosen.num_gpus)["gpus_per_node"]}
    job = job_of_text("launch.sh", files["launch.sh"], files, cluster=nodes)
    assert same_run(job.layout, chosen, job.model.num_hidden_layers, "torchtitan")
    assert job.cluster.num_gpus == chosen.num_gpus
    read = {"global_batch_size": batch, "trainer_version": line, "overlap": {"ep": False}}
    assert job.training == training(**read)
    ours, theirs = (one.model_dump(exclude={"name"}) for one in (job.model, model(name)))
    assert ours == theirs


@tiers(6, 60, data=st.data(), line=st.sampled_from(["0.2.2", "0.3.0"]))
def test_an_edited_script_runs_the_new_layout(data: st.DataObject, line: str) -> None:
    first, winner = (data.draw(runnable("llama3-8b", "torchtitan", line)) for _ in range(2))
    winner = winner.model_copy(update={axis: getattr(first, axis) for axis in AXES})
    own = 4 * winner.micro_batch_size * winner.dp_degree
    if exported(winner, "llama3-8b", "torchtitan", line, own).blockers:
        return
    batch = own * first.micro_batch_size
    before = exported(first, "llama3-8b", "torchtitan", line, batch).files
    more = "--comm.init_timeout_seconds 7"
    text = before["launch.sh"].replace('  "$@"', f'  {more} \\\n  "$@"')
    given = {name: text for name, text in before.items() if name != "launch.sh"}
    spec = CurrentSpec(name="launch.sh", text=text, files=given)
    files = edited(spec, winner, "llama3-8b", batch)
    job = job_of_text("launch.sh", files.get("launch.sh", text), files)
    assert same_run(job.layout, winner, 32, "torchtitan")
    assert job.training.global_batch_size == batch
    assert more in files.get("launch.sh", text)


@pytest.mark.parametrize(("config", "training", "ran"), [
    ("llama3 --config llama3_8b", {"cuda_graphs": None, "chunked_loss": None}, {}),
    ("llama3 --config llama3_8b --training.disable_cuda_graphs", 
        {"cuda_graphs": "none", "chunked_loss": None}, {}),
    # who must do without has not chosen to
    (f"llama3 --config llama3_8b {PP2} --training.disable_cuda_graphs",
        {"cuda_graphs": None, "chunked_loss": None}, {"pp": 2}),
    ("deepseek_v3 --config deepseek_v3_16b_hybridep", {}, {"moe_dispatcher": "hybridep", "ep": 8}),
    # a program of its own
    ("graph_trainer.deepseek_v3 --config graph_trainer_deepseek_v3_16b "
        "--compile.memory_policy full", {"trainer_version": "0.3.0, graph_trainer"},
        {"compile": True, "ac": "full", "ep": 8}),
])  # fmt: skip
def test_configs_of_0_3(config: str, training: dict[str, object], ran: dict[str, object]) -> None:
    job = job_of_text("launch.sh", f"{RUN} {config}", {}, cluster=H100)
    assert {name: getattr(job.training, name) for name in training} == training
    assert {name: getattr(job.layout, name) for name in ran} == ran
    if "graph_trainer" in config:
        made = to_titan(job.layout, job.model, job.cluster, job.training)
        assert [fault.field for fault in made.blockers] == ["training.trainer_version"]


def test_pipelines_with_cuda_graphs_stop_0_3() -> None:
    spec = CurrentSpec(name="launch.sh", text=f"{RUN} llama3 --config llama3_8b {PP2}")
    run = read(spec).run(model("llama3.1-8b"), 8)
    assert [fault.field for fault in run.refusals] == ["training.disable_cuda_graphs"]


def test_the_loss_and_the_dispatcher_in_a_module() -> None:
    values = {"ep": 8, "moe_dispatcher": "deepep", "precision": "float8-rowwise-gw-hp"}
    chosen, asked = layout(8, **values, compile=True), {"chunked_loss": False}
    job = training(**asked, trainer_version="0.3.0")
    files = to_titan(chosen, model("deepseek-v2-lite"), cluster(8), job).files
    job = job_of_text("launch.sh", files["launch.sh"], files, cluster=H100)
    assert (job.training.chunked_loss, job.layout) == (False, chosen)
