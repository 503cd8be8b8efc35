"""Plain FSDP exported: the configuration as Accelerate reads it, the module as torch runs it."""

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from export_cases import cluster, layout, model, training
from real_torchtitan import FOLDER

from planner.export import export
from planner.export.accelerate import ACCELERATE, CONFIG, MODULE
from planner.export.base import Export
from planner.specs.layout import Layout
from tests.conftest import missing, needed
from tests.conftest import ran as run


def exported(chosen: Layout, gpus: int = 8, **more: object) -> Export:
    job = training(trainer="fsdp", **{"seq_len": 16, "global_batch_size": 16, **more})
    return export(chosen, model("llama3-8b"), cluster(gpus), job, to="accelerate")


def plain(gpus: int = 8, **values: object) -> Layout:
    return layout(gpus, "fsdp", **values)


def test_both_files_say_the_layout() -> None:
    made = exported(plain(dp_replicate=2, zero_stage=2, ac="full", compile=True))
    assert made.blockers == ()
    assert made.command[:2] == ("torchrun", "--standalone")
    wanted = {
        "mixed_precision: bf16", "num_processes: 8", "  fsdp_version: 2",
        "  fsdp_reshard_after_forward: false", "  fsdp_activation_checkpointing: true",
        "  parallelism_config_dp_replicate_size: 2", "  parallelism_config_dp_shard_size: 4",
        "  dynamo_backend: INDUCTOR",
    }  # fmt: skip
    assert wanted <= set(made.files[CONFIG].splitlines())
    for words in (
        "SEQ_LEN, MICRO_BATCH, ACCUMULATE, STEPS = 16, 1, 2, 1000",
        'init_device_mesh(DEVICE, (2, 4), mesh_dim_names=("replicate", "shard"))',
        "fully_shard(layer, reshard_after_forward=False", "layers[index].compile()",
        'MODEL = "meta-llama/Meta-Llama-3-8B"',
    ):  # fmt: skip
        assert words in made.files[MODULE]
    assert any("reduces gradients in bfloat16" in note for note in made.notes)
    offloaded = exported(plain(cpu_offload=True)).files
    assert "offload_policy=CPUOffloadPolicy()," in offloaded[MODULE]
    assert "  fsdp_offload_params: true" in offloaded[CONFIG].splitlines()


def test_tp_and_cp_are_accelerates_and_nodes_are_slurms() -> None:
    made = exported(plain(tp=2, cp=2, sequence_parallel=True))
    assert MODULE not in made.files
    assert made.command[:2] == ("accelerate", "launch")
    assert "  parallelism_config_cp_comm_strategy: allgather" in made.files[CONFIG].splitlines()
    many = exported(plain(16), 16)
    assert many.command == ("sbatch", "slurm.sbatch")
    assert "num_machines: 2" in many.files[CONFIG]


LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"ac": "full"},
    "zero2": {"zero_stage": 2, "ac": "selective-op", "compile": True},
    "hsdp": {"dp_replicate": 2, "ac": "selective-layer-2"},
    "block": {"ac": "block-1", "reduce_dtype": "bfloat16"},
    "offload": {"cpu_offload": True},
    "ddp": {"dp_replicate": 4, "dp_shard": 1, "ac": "full"},
    "float8": {"precision": "float8-rowwise", "ac": "none"},
}

# argv: folders of exports. Trains a small model by each one's module, on CPUs.
RUN = """
import json, os, runpy, sys, types
import torch, torch.distributed as dist, torch.nn as nn
from torch.distributed.fsdp import FSDPModule

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 128), nn.Linear(128, 64)
    def forward(self, x):
        q = self.q(x).unflatten(-1, (2, 32)).transpose(1, 2)
        a = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        x = x + a.transpose(1, 2).flatten(-2)
        return x + self.down(torch.relu(self.up(x)))

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(1000, 64), nn.Linear(64, 1000)
        self.layers = nn.ModuleList(Block() for _ in range(4))
    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        scores = self.lm_head(x).float()[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(scores, labels[:, 1:].flatten())
        return types.SimpleNamespace(loss=loss)

def tried(folder):
    ours = types.SimpleNamespace(**runpy.run_path(folder + "/fully_shard.py"))
    torch.manual_seed(0)
    model = ours.shard(Small())
    units = [one for one in model.modules() if isinstance(one, FSDPModule)]
    groups = [one._get_fsdp_state()._fsdp_param_group for one in units]
    said = {
        "units": len(units),
        "mesh": [list(one.mesh_info.mesh.shape) for one in groups],
        "dtypes": [str(one.mp_policy.reduce_dtype) for one in groups],
        "kinds": sorted({type(one).__name__ for one in model.modules()}),
    }
    if "Float8Linear" not in said["kinds"]:  # whose products need a GPU
        one = next(ours.batches())
        def again():
            while True:
                yield one
        ours.train(model, again(), steps=4)
    said["reshard"] = [one.post_forward_mesh_info is not None for one in groups]
    if dist.get_rank() == 0:
        print(json.dumps(said))

dist.init_process_group("gloo")
for folder in sys.argv[1:]:
    tried(folder)
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # to tear torch down takes a second
"""
TRAINED = sorted(LAYOUTS.keys() - {"offload"})  # pins memory for a GPU


def printed(words: list[str], **variables: str) -> str:
    """What a program of Python prints."""
    ended = run(sys.executable, *words, env=variables, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What torch printed by name, all modules run in one job of four processes."""
    needed("torch")
    names = [name for name in TRAINED if name != "float8" or find_spec("torchao")]
    folder = tmp_path_factory.mktemp("modules")
    for name in names:
        made = exported(plain(4, **LAYOUTS[name]), 4)
        assert made.blockers == ()
        (folder / name).mkdir()
        (folder / name / MODULE).write_text(made.files[MODULE], encoding="utf-8")
    (folder / "run.py").write_text(RUN, encoding="utf-8")
    words = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"]
    words += ["--nproc_per_node=4", str(folder / "run.py"), *(str(folder / one) for one in names)]
    # what compiles is torch's matter
    said = printed(words, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
    each = re.findall(r"(?:^step .*\n)*^\{.*\n", said, re.MULTILINE)
    return dict(zip(names, each, strict=True))


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.torch
@pytest.mark.slow
def test_torch_runs_the_module(name: str, ran: dict[str, str]) -> None:
    if name == "float8":
        needed("torchao")
    chosen = plain(4, **LAYOUTS[name])
    said = json.loads(ran[name].splitlines()[-1])
    losses = [float(found) for found in re.findall(r"loss (\S+)", ran[name])]
    if name != "float8":
        assert len(losses) == 4
        assert losses[-1] < losses[0]
    if chosen.dp_shard > 1:
        assert said["units"] == 4 + 1
        assert said["reshard"][1:] == [chosen.zero_stage == 3] * 4
        assert not said["reshard"][0] or not losses, "the root stays gathered once it ran"
        shape = "(2, 2)" if chosen.dp_replicate == 2 else "(4,)"
        assert {str(mesh) for mesh in map(tuple, said["mesh"])} == {shape}
        assert set(said["dtypes"]) == {f"torch.{chosen.reduce_dtype}"}
    else:
        assert "DistributedDataParallel" in said["kinds"]
    wrapped = {"CheckpointWrapper", "FSDPCheckpointWrapper"} & {*said["kinds"]}
    assert bool(wrapped) == (chosen.ac != "none")
    assert ("Float8Linear" in said["kinds"]) == (name == "float8")


# argv[1]: a JSON list of files. Prints what the plugins of Accelerate hold after its launcher.
READ = """
import json, os, sys
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
answers = []
for file in json.loads(sys.argv[1]):
    args = launch_command_parser().parse_args(["--config_file", file, "--main_process_port", "0", "x.py"])
    args, _, _ = _validate_launch_command(args)
    kept = dict(os.environ)
    os.environ.update(prepare_multi_gpu_env(args))
    said = {"fsdp": bool(args.use_fsdp), "mixed": args.mixed_precision, "processes": args.num_processes,
            "machines": args.num_machines, "dynamo": os.environ.get("ACCELERATE_DYNAMO_BACKEND")}
    if args.use_fsdp:
        plugin = FullyShardedDataParallelPlugin()
        said |= {"version": plugin.fsdp_version, "reshard": plugin.reshard_after_forward,
                 "recomputes": plugin.activation_checkpointing,
                 "offload": type(plugin.cpu_offload).__name__}
        plugin.set_mixed_precision(args.mixed_precision)
        said["reduce"] = str(plugin.mixed_precision_policy.reduce_dtype)
    if args.use_parallelism_config:
        sizes = ParallelismConfig()
        said["sizes"] = [sizes.dp_replicate_size, sizes.dp_shard_size, sizes.cp_size, sizes.tp_size]
    answers.append(said)
    os.environ.clear()
    os.environ.update(kept)
print(json.dumps(answers))
"""  # noqa: E501


@pytest.mark.torch
@pytest.mark.slow
def test_accelerate_reads_the_configuration(tmp_path: Path) -> None:
    needed("torch")
    if not (Path(FOLDER) / f"accelerate-{ACCELERATE}.dist-info").is_dir():
        missing(f"accelerate {ACCELERATE}", "`make test-slow` installs titan-requirements.txt")
    cases = {**LAYOUTS, "cp": {"cp": 2, "dp_shard": 2}}
    chosen = {name: plain(4, **values) for name, values in cases.items()}
    for name, one in chosen.items():
        (tmp_path / f"{name}.yaml").write_text(exported(one, 4).files[CONFIG], encoding="utf-8")
    files = [str(tmp_path / f"{name}.yaml") for name in chosen]
    answers = printed(["-c", READ, json.dumps(files)], PYTHONPATH=FOLDER).strip().splitlines()[-1]
    for (name, one), said in zip(chosen.items(), json.loads(answers), strict=True):
        sharded = one.dp_shard * one.cp > 1
        assert (said["fsdp"], said["processes"], said["mixed"]) == (sharded, 4, "bf16"), name
        assert (str(said["dynamo"]).lower() == "inductor") == one.compile
        if sharded:
            assert said["version"] == 2
            assert said["reshard"] is (one.zero_stage == 3), name
            assert said["recomputes"] is (one.ac != "none"), name
            assert (said["offload"] == "CPUOffloadPolicy") == one.cpu_offload, name
            assert said["reduce"] == "torch.bfloat16", "what a note says"
        sizes = [one.dp_replicate, one.dp_shard, one.cp, one.tp]
        assert said.get("sizes", sizes) == sizes
        assert ("sizes" in said) == (sharded and one.dp_replicate * one.cp * one.tp > 1)
