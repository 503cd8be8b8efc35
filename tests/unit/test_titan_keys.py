"""Settings that TorchTitan does not have, and its configurations in Python."""

from pathlib import Path

import pytest
from current_cases import exported, job_of_text, same_run
from export_cases import layout

from planner.errors import SpecError
from planner.estimates import estimate_job
from planner.intake.current import format_of, read
from planner.intake.trainer_files.titan_changes import titan_changes
from planner.intake.trainer_files.titan_command import edited_command
from planner.intake.trainer_files.titan_registry import config_names, only, read_registry
from planner.specs.job import CurrentSpec

CASES = Path(__file__).parents[1] / "cases"
REGISTRY = CASES / "32-titan-python-registry"
H100 = {"gpu": "h100-sxm-80gb", "num_gpus": 8}


def text(name: str) -> str:
    return (REGISTRY / name).read_text(encoding="utf-8")


def notes_of(toml: str, **machine: object) -> tuple[str, ...]:
    job = job_of_text("train.toml", toml, cluster={**H100, **machine})
    stated = read(CurrentSpec(name="train.toml", text=toml))
    return stated.run(job.model, job.cluster.num_gpus).notes


def test_a_misspelt_flag_or_key_is_refused_with_what_was_meant() -> None:
    with pytest.raises(SpecError, match="Unrecognized options") as caught:
        job_of_text("typo.sh", text("typo.sh"))
    assert {fault.field: fault.remedy for fault in caught.value.faults} == {
        "training.local_batchsize": "did you mean training.local_batch_size?",
        "parallelism.tensor_parallel_degre": "did you mean parallelism.tensor_parallel_degree?",
    }
    toml = '[model]\nflavor = "8B"\n[training]\nbatchsize = 4\n[mine]\nx = 1\n'
    with pytest.raises(SpecError, match="Invalid field names") as caught:
        job_of_text("train.toml", toml, cluster=H100)
    assert [fault.field for fault in caught.value.faults] == ["training.batchsize", "mine.x"]


def test_settings_of_ones_own_and_from_before_0_2_are_noted() -> None:
    """A module that extends the settings may have any."""
    toml = '[job]\ncustom_config_module = "mine"\n[model]\nflavor = "8B"\n[training]\nnew_one = 4\n'
    assert "training.new_one: of your own" in notes_of(toml)[0]
    toml = '[model]\nflavor = "8B"\nnorm_type = "rmsnorm"\n[training]\nbatch_size = 1\n'
    assert "model.norm_type: from before 0.2, not priced" in notes_of(toml)
    for table, former in (("parallelism", False), ("experimental", True)):
        toml = f'[model]\nflavor = "8B"\n[{table}]\nenable_compiled_autograd = false\n'
        assert any("before 0.2" in note for note in notes_of(toml)) is former, table


def test_batches_in_tokens_are_read_as_sequences() -> None:
    job = job_of_text("new_flags.sh", text("new_flags.sh"))
    assert job.layout == layout(8, tp=2, micro_batch_size=2)
    assert (job.training.seq_len, job.training.global_batch_size) == (16384, 8)
    with pytest.raises(SpecError, match="no whole number of sequences of 16384"):
        job_of_text("run.sh", text("new_flags.sh").replace("32768", "32769"))
    piped = text("new_flags.sh").replace(
        "--parallelism.tensor_parallel_degree 2",
        "--parallelism.pipeline_parallel_degree 2 --parallelism.num_pp_microbatches 4 "
        "--training.disable_cuda_graphs",
    )
    job = job_of_text("run.sh", piped)
    found = (job.layout.pp, job.layout.micro_batch_size, job.training.global_batch_size)
    assert found == (2, 2, 2 * 4 * 4)


def test_batches_in_tokens_are_rewritten_in_tokens() -> None:
    spec = CurrentSpec(name="run.sh", text=text("new_flags.sh"))
    stated, winner = read(spec), layout(8, dp_shard=8, micro_batch_size=1)
    made = exported(winner, "llama3-8b", "torchtitan", "0.3.0", 8, seq_len=16384)
    changes, _ = titan_changes(stated, winner, made)
    assert changes["training.num_tokens_per_microbatch_per_dp_rank"] == 16384
    assert changes["training.num_tokens_per_train_step"] == 8 * 16384
    assert not {"training.local_batch_size", "training.global_batch_size"} & changes.keys()
    new = edited_command(spec, changes, stated.spelling, stated.line)["run.sh"]
    assert same_run(job_of_text("run.sh", new).layout, winner, 32, "torchtitan")


def test_a_configuration_in_python_is_read() -> None:
    source = text("config_registry.py")
    assert format_of(source, "config_registry.py") == "torchtitan-python"
    job = job_of_text("config_registry.py", source, cluster=H100, model="llama3-8b")
    assert job.layout == layout(8, tp=2, micro_batch_size=2, compile=True)
    assert (job.training.seq_len, job.training.trainer_version) == (8192, "0.3.0")
    with pytest.raises(SpecError, match=r"model is not in config_registry\.py"):
        job_of_text("config_registry.py", source, cluster=H100)


def test_a_command_takes_the_users_own_configuration() -> None:
    line = "NGPU=8 ./run_train.sh --module mine --config my_llama3_8b --training.seq_len 4096"
    files = {"mine/config_registry.py": text("config_registry.py")}
    job = job_of_text("run.sh", line, files, model="llama3-8b")
    assert job.layout == layout(8, tp=2, micro_batch_size=2, compile=True)
    assert job.training.seq_len == 4096
    for wrong, given, words in (
        (line.replace("my_llama3", "no_llama3"), files, "has my_llama3_8b"),
        (line, None, r"keep mine\.py or its config_registry\.py"),
        ("NGPU=8 MODULE=llama3 CONFIG=llama3_9b ./run_train.sh", None, "use llama3_8b, "),
    ):
        with pytest.raises(SpecError, match=words):
            job_of_text("run.sh", wrong, given, model="llama3-8b")


TWO = """
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_70b
WIDTH = 2
def base() -> Trainer.Config:
    spec = model_registry("8B")
    return Trainer.Config(model_spec=spec, optimizer=default_adamw(lr=1e-4),
        training=TrainingConfig(local_batch_size=WIDTH, seq_len=2 * 4096),
        activation_checkpoint=FullAC.Config())
def changed() -> Trainer.Config:
    config = base()
    config.parallelism.tensor_parallel_degree = 2 * WIDTH
    config.compile = CompileConfig(enable=True, components=["model"])
    config.activation_checkpoint = None
    return config
def theirs() -> Trainer.Config:
    config = llama3_70b()
    config.training.local_batch_size = 4
    return config
def own() -> Trainer.Config:
    config = base()
    config.model_spec = model_registry("70B", converters=[MXFP8LinearConverter.Config()])
    return config
def large() -> Trainer.Config:
    return llama3_405b()
def open_end() -> Trainer.Config:
    config = base()
    config.training.seq_len = int(os.environ["LENGTH"])
    return config
def branches() -> Trainer.Config:
    config = base()
    if WIDTH > 1:
        config.training.seq_len = 1
    return config
"""


def test_a_module_with_several_configurations() -> None:
    own = ["own", "large", "open_end", "branches"]
    assert config_names(TWO) == ["base", "changed", "theirs", *own]
    assert read_registry(TWO, "changed") == {
        "optimizer.name": "AdamW", "training.local_batch_size": 2, "training.seq_len": 8192,
        "parallelism.tensor_parallel_degree": 4, "compile.enable": True, "compile.components":
        ["model"], "activation_checkpoint.mode": "none", "model_spec": 'model_registry("8B")',
    }  # fmt: skip
    want = {"training.local_batch_size": 4, "parallelism.tensor_parallel_degree": 8}
    assert want.items() <= read_registry(TWO, "theirs").items()
    assert "def base" in only(TWO, "changed")
    assert "def theirs" not in only(TWO, "changed")
    line = "torchrun --nproc_per_node 8 -m torchtitan.train --module my.llama3 --config "
    here = TWO.replace("torchtitan.models.llama3 import", ". import")
    for name, model, precision in (
        ("changed", "llama3.1-8b", "bf16"),  # though the module has converters for others
        ("own", "llama3.1-70b", "mxfp8"),
        ("large", "llama3.1-405b", "float8-rowwise"),
    ):
        job = job_of_text("run.sh", line + name, {"my/llama3/config_registry.py": here})
        assert (job.model.name, job.layout.precision) == (model, precision)
    with pytest.raises(SpecError, match=r"training\.seq_len is .*only running"):
        read_registry(TWO, "open_end")
    with pytest.raises(SpecError, match="branches in line"):
        read_registry(TWO, "branches")
    with pytest.raises(SpecError, match="has base, changed, theirs"):
        job_of_text("config_registry.py", TWO, cluster=H100)


def test_rowwise_with_tp_says_that_it_gained_nothing() -> None:
    notes = {}
    machine = {"gpu": "h100-sxm-96gb-hbm2e", "num_gpus": 4}
    for name in ("bf16", "rowwise"):
        toml = (CASES / "01-tp-float8-rowwise" / f"{name}.toml").read_text(encoding="utf-8")
        notes[name] = [one for one in notes_of(toml, **machine) if "gained nothing" in one]
        job = job_of_text(f"{name}.toml", toml, cluster=machine)
        reserved = estimate_job(job).peak_reserved_bytes / 2**30
        assert reserved == pytest.approx(45.7, rel=0.08), "measured of both"
    assert notes["bf16"] == []
    assert "torchtitan issue 1207" in notes["rowwise"][0]


def test_a_class_of_settings_that_the_module_extends() -> None:
    source = """
@dataclass(kw_only=True, slots=True)
class Training(TrainingConfig):
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "bfloat16"
def mine() -> Trainer.Config:
    return Trainer.Config(training=Training(seq_len=4096))
"""
    assert read_registry(source, "mine") == {
        "training.mixed_precision_reduce": "bfloat16",
        "training.seq_len": 4096,
    }
