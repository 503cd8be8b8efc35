"""Megatron-LM's argument scripts read as a job, and edited into another layout."""

import re
from pathlib import Path

import pytest
from current_cases import EXAMPLES, exported, job_of_text, machine, runnable, same_run, unsaid
from export_cases import MODELS, layout, model, to_megatron
from hypothesis import strategies as st

from planner.errors import SpecError
from planner.export.commands import read_flags
from planner.export.megatron_read import plain_names, read_arguments, read_layout
from planner.intake.current import read, read_again
from planner.intake.trainer_files.files import read_current
from planner.intake.trainer_files.megatron import edited_script, megatron_changes, say
from planner.intake.trainer_files.rewrite import rewrite
from planner.specs.job import CurrentSpec
from planner.specs.layout import Layout
from tests.conftest import tiers

HIDING = "overlap-grad-reduce", "overlap-param-gather"
SCRIPT = (EXAMPLES / "pretrain_llama3_70b.sh").read_text(encoding="utf-8")


def edited(text: str, winner: Layout, name: str, batch: int, **training: object) -> str:
    spec = CurrentSpec(name="train.sh", text=text)
    made = exported(winner, name, "megatron", batch=batch, **training)
    changes, _ = megatron_changes(read(spec), winner, made, batch)
    return edited_script(spec, changes)


def test_an_example_script() -> None:
    job = job_of_text("pretrain_llama3_70b.sh", SCRIPT)
    nodes = job.cluster
    assert (job.model.name, nodes.num_gpus, nodes.gpus_per_node) == ("llama3-70b", 64, 8)
    want = {"tp": 8, "pp": 4, "virtual_stages": 4, "pp_schedule": "Interleaved1F1B"}
    want |= {"ac": "full", "cp_method": "alltoall"}
    assert job.layout == layout(64, "megatron", **want)
    assert (job.training.trainer, job.training.seq_len) == ("megatron", 8192)
    assert job.training.global_batch_size == 256


def test_shapes_that_the_catalogue_lacks_become_a_model_of_their_own() -> None:
    text = SCRIPT.replace("--num-layers 80", "--num-layers 16 --vocab-size 50000")
    text = text.replace("--num-layers-per-virtual-pipeline-stage 5\n", "\n")
    model = job_of_text("train.sh", text).model
    assert (model.num_hidden_layers, model.vocab_size, model.hidden_size) == (16, 50000, 8192)


def test_a_vocabulary_that_only_a_tokenizer_knows_is_asked_for() -> None:
    with pytest.raises(SpecError, match=r"model is not in train\.sh: it has no --vocab-size"):
        job_of_text("train.sh", SCRIPT.replace("meta-llama/Meta-Llama-3-70B", "./my-tokenizer"))
    for flags in ("--tokenizer-type GPT2BPETokenizer", "--vocab-file v.json"):
        job = job_of_text("train.sh", LINE.replace("--vocab-size 50257", flags))
        assert job.model.vocab_size == 50257


LINE = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 "
    "--num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--vocab-size 50257 --micro-batch-size 4 --tensor-model-parallel-size 2 --fp16"
)


@pytest.mark.parametrize(("line", "words"), [
    (LINE.replace("gpt", "bert"), r"pretrain_bert\.py'?: starts something else than the training"),
    (f"N=$3\n{LINE.replace('layers 24', 'layers $N')}", r"no --num-layers \(\$N is only known"),
    (f"{LINE} --global-batch-size $G", "--global-batch-size has no value that the text alone"),
    *((f"{LINE} --optimizer-cpu-offload --optimizer-offload-fraction {share}",
        "no share from 0 to 1") for share in ("half", "1.5", "-0.1", "nan")),
    (f"{LINE} --deepspeed", "--zero-stage is not in the command"),
    (f"{LINE} --clip-grad abc", "--clip-grad='abc': is not a number"),
    (f"{LINE} --rollout-batch-size 8", "'--rollout-batch-size': starts something else"),
    (LINE.replace("pretrain_gpt", "a/convert"), r"'a/convert\.py': starts something else"),
    (f". c/a.sh\n{LINE.replace('size 2 ', 'size $TP ')}",
        r"'c/a\.sh': is read in, is not there, and --tensor-model-parallel-size may come from it"),
    (f". a.sh\n{LINE.replace('--num-layers 24', '$LAYERS')}", r"layers; a\.sh, which it reads in"),
    (f"{LINE} --deepspeed --zero-stage 1 --num-experts 8 16", "are different numbers of experts"),
])  # fmt: skip
def test_a_script_that_cannot_be_priced_says_why(line: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        job_of_text("train.sh", line)


@pytest.mark.parametrize(("flags", "want"), [
    ("--zero-stage 0", {"zero_stage": 0}),
    ("--zero-stage 0 --bf16", {"zero_stage": 1, "reduce_dtype": "bfloat16"}),
    ('--zero-stage 0 <<E\n{"zero_optimization": {"stage": 2}}\nE', {"zero_stage": 2}),
    ("--checkpoint-activations --checkpoint-num-layers 2 --use-flash-attn-v2", {"ac": "uniform-2"}),
    ("--num-experts 8 --tensor-model-parallel-size 2 --enable-expert-tensor-parallelism "
        "--enable-zbh1-pipeline", {"etp": 2}),
    ("--cpu-optimizer --checkpoint-activations", {"cpu_offload": True, "ac": "full"}),
    ("--ds-sequence-parallel-size 2", {"cp": 2, "cp_method": "ulysses", "dp_shard": 4, "tp": 1}),
    ("--glu-activation geglu --ffn-hidden-size 2730", {}),
    ("--num-experts 8 --moe-expert-parallel-size 4", {"ep": 4, "moe_dispatcher": "alltoall"}),
])  # fmt: skip
def test_megatron_deepspeed(flags: str, want: dict[str, object]) -> None:
    line = LINE.replace("size 2 ", "size 1 ").replace("--fp16", "" if "16" in flags else "--fp16")
    line = line.replace("torchrun --nproc_per_node", "deepspeed --num_gpus")
    spec = CurrentSpec(name="t.sh", text=f"{line} --deepspeed --zero-stage 3 {flags}")
    job = job_of_text("t.sh", spec.text)
    assert job.training.trainer == "megatron-deepspeed"
    assert job.model.mlp == ("swiglu" if "glu" in flags else "gelu")
    assert job.training.attention_kernel == ("flash" if "flash" in flags else "unfused")
    given = {"zero_stage": 3, **want}
    assert {name: getattr(job.layout, name) for name in given} == given
    if job.model.is_moe:
        assert sum(kind.moe for kind in job.model.layer_kinds()) == 12
        assert job.model.num_experts_per_tok == 1
    run = read(spec).run(job.model, 8)
    assert not run.refusals
    notes = "\n".join(run.notes)
    assert ("--deepspeed_config" in notes, "zbh1" in notes) == ("<<" not in flags, "zbh1" in flags)


def test_files_that_a_script_names_stand_beside_it(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.sh").write_text("TP=4\nZERO=1")
    zero = '{"stage": STAGE, "offload_optimizer": {"device": "cpu"}}'
    (tmp_path / "ds.json").write_text(f'{{"zero_optimization": {zero}}}')
    line = LINE.replace("size 2 ", "size $TP ")
    (tmp_path / "t.sh").write_text(
        f'D=$(pwd)\nsource "$D/c/a.sh"\nsed "s/STAGE/$ZERO/" ds.json > new.json\n'
        f"{line} --deepspeed --deepspeed_config new.json"
    )
    job = read_current(tmp_path / "t.sh", cluster={"gpu": "h100-sxm-80gb"})
    assert (job.layout.tp, job.layout.zero_stage, job.layout.cpu_offload) == (4, 1, True)
    assert job.request["current"]["files"].keys() == {"/c/a.sh", "ds.json"}


def test_a_script_is_read_with_its_parameters(tmp_path: Path) -> None:
    text = 'TP=$1\nARGS="--tensor-model-parallel-size $TP"\n'
    text += LINE.replace("--tensor-model-parallel-size 2 --fp16", "$ARGS")
    (tmp_path / "t.sh").write_text(text)
    job = read_current(f"{tmp_path / 't.sh'} 4 /d", cluster={"gpu": "h100-sxm-80gb"})
    assert (job.layout.tp, job.request["current"]["files"]) == (4, {"$@": "4 /d"})
    spec = CurrentSpec.model_validate(job.request["current"])
    assert "size $TP --sequence-parallel" in edited_script(spec, {"sequence_parallel": []})
    assert edited_script(spec, {"tensor_model_parallel_size": ["8"]}).startswith("TP=8\n")
    given = {"name": "t.sh", "text": f". a.sh\n{text}", "files": {"a.sh": "set x", "$@": "4"}}
    current = read_again({"current": given}, model("llama3-8b"), 8)
    winner = layout(8, "megatron", tp=2)
    new = rewrite(current, winner, exported(winner, "llama3-8b", "megatron", batch=16), 16)
    assert (new.files, new.notes[0][:19]) == ({}, "t.sh is not changed")
    with pytest.raises(SpecError, match="has parameters that no shell reads"):
        read_current(f"{tmp_path / 't.sh'} '4")


@pytest.mark.parametrize(("flags", "want"), [
    ("--bf16", {"reduce_dtype": "float32"}), ("--fp16", {"reduce_dtype": "bfloat16"}),
    ("--fp16 --accumulate-allreduce-grads-in-fp32", {"reduce_dtype": "float32"}),
    ("--bf16 --megatron-fsdp-main-grads-dtype bf16", {"reduce_dtype": "bfloat16"}),
    ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", {"zero_stage": 2}),
    ("", {"cpu_offload": False}), ("--optimizer-offload-fraction 0.35", {"cpu_offload": False}),
    ("--optimizer-cpu-offload", {"cpu_offload": True, "optimizer_offload_fraction": 1.0}),
    ("--optimizer-cpu-offload --optimizer-offload-fraction 0.35",
        {"cpu_offload": True, "optimizer_offload_fraction": 0.35}),
    ("--optimizer-cpu-offload --optimizer-offload-fraction 0", {"cpu_offload": False}),
])  # fmt: skip
def test_words_mean_a_layout(flags: str, want: dict[str, object]) -> None:
    words = plain_names(read_flags(f"--micro-batch-size 1 {flags}".split()))
    found = read_arguments(words, 32, 8)
    assert {name: found[name] for name in want} == want


def test_positions_and_heads_that_other_flags_decide() -> None:
    rope, hybrid = (
        job_of_text("t.sh", f"{LINE} {flag}").model
        for flag in ("--use-rotary-position-embeddings", "--hybrid-layer-pattern M-M*")
    )
    assert (rope.position_embedding, hybrid.mamba_num_heads) == ("rope", 2 * 2048 // 64)


def test_what_megatron_assumes_where_nothing_is_said() -> None:
    job = job_of_text("train.sh", LINE)
    known = {"intermediate_size": 8192, "mlp": "gelu", "norm": "layernorm", "mlp_bias": True}
    known |= {"tie_word_embeddings": True, "position_embedding": "learned"}
    assert job.model.num_key_value_heads == 16
    assert {name: getattr(job.model, name) for name in known} == known
    want = {"tp": 2, "micro_batch_size": 4, "precision": "fp16", "reduce_dtype": "bfloat16"}
    want |= {"zero_stage": 0, "sequence_parallel": False, "cp_method": "alltoall"}
    assert job.layout == layout(8, "megatron", **want)
    assert (job.training.global_batch_size, job.training.overlap.dp) == (16, False)


@pytest.mark.parametrize(("text", "split"), [
    ("Et*2|t*3|t*2L", (2, 3, 2)),
    ("Ett|tt|ttL", (2, 2, 2)),
    ("E|(t|)*3L", (0, 1, 1, 1, 0)),
    ("Et*3|(tt|)*2mL", (3, 2, 2, 0)),
    ("E,t,t|t|L", (2, 1, 0)),
])  # fmt: skip
def test_layout_strings(text: str, split: tuple[int, ...]) -> None:
    assert read_layout(text) == split


@pytest.mark.parametrize(("layers", "extra", "split"), [
    (80, "--decoder-first-pipeline-num-layers 17", (17, 21, 21, 21)),
    (80, "--decoder-last-pipeline-num-layers 17", (21, 21, 21, 17)),
    (78, "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        (19, 20, 20, 19)),
])  # fmt: skip
def test_ends_of_a_pipeline(layers: int, extra: str, split: tuple[int, ...]) -> None:
    text = SCRIPT.replace("--num-layers-per-virtual-pipeline-stage 5", extra)
    text = text.replace("--num-layers 80", f"--num-layers {layers}")
    job = job_of_text("train.sh", text.replace("--bf16", "--bf16 --vocab-size 128256"))
    assert (job.layout.virtual_stages, job.layout.layers_per_stage) == (1, split)


def test_a_value_from_a_variable_changes_there_unless_another_flag_shares_it() -> None:
    winner = layout(64, "megatron", tp=4, pp=4, ac="full")
    assert "\nTP=4\n" in edited(SCRIPT, winner, "llama3-70b", 256)
    own = "--sequence-parallel\n    --my-size ${TP}\n"
    shared = SCRIPT.replace("--context-parallel-size", "").replace("--sequence-parallel\n", own)
    new = edited(shared, winner, "llama3-70b", 256)
    for words in ("\nTP=8\n", "--tensor-model-parallel-size 4\n", "--my-size ${TP}\n"):
        assert words in new


@tiers(10, 100, data=st.data())
def test_every_export_reads_back_from_its_script(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(MODELS))
    chosen = data.draw(runnable(name, "megatron", "0.14"))
    batch = 4 * chosen.micro_batch_size * chosen.dp_degree
    made = exported(chosen, name, "megatron", batch=batch)
    nodes = {"gpu": "h100-sxm-80gb", "gpus_per_node": machine(chosen.num_gpus)["gpus_per_node"]}
    job = job_of_text("launch.sh", made.files["launch.sh"], made.files, cluster=nodes)
    layers = model(name).num_hidden_layers
    assert same_run(job.layout.model_copy(update=unsaid(made)), chosen, layers, "megatron")
    assert job.cluster.num_gpus == chosen.num_gpus
    assert (job.training.trainer, job.training.seq_len) == ("megatron", 8192)
    assert job.training.global_batch_size == batch
    other = {"name", "max_position_embeddings", "sliding_window", "sliding_mask"}
    assert job.model.model_dump(exclude=other) == model(name).model_dump(exclude=other)


@tiers(10, 100, data=st.data())
def test_an_edited_script_runs_the_new_layout_and_keeps_the_rest(data: st.DataObject) -> None:
    winner = data.draw(runnable("llama3-70b", "megatron", "0.14"))
    batch = 2 * winner.micro_batch_size * winner.dp_degree
    new = edited(SCRIPT, winner, "llama3-70b", batch)
    told = unsaid(exported(winner, "llama3-70b", "megatron", batch=batch))
    run = read(CurrentSpec(name="train.sh", text=new)).run(model("llama3-70b"), winner.num_gpus)
    assert same_run(Layout.model_validate({**run.layout, **told}), winner, 80, "megatron")
    assert run.training["global_batch_size"] == batch
    before, after = (
        [line for line in text.splitlines() if re.search("DATA|#|LOGGING", line)]
        for text in (SCRIPT, new)
    )
    assert after == before
    assert edited(new, winner, "llama3-70b", batch) == new


@pytest.mark.parametrize("graphs", [None, "partial", "full"])
@pytest.mark.parametrize("version", ["0.14", "0.15", "0.16", "0.18"])
def test_graphs_read_back_from_a_script(graphs: str | None, version: str) -> None:
    """Under a release that has the arguments, so that the job it makes may run."""
    job = {"trainer_version": version, **({"cuda_graphs": graphs} if graphs else {})}
    made = exported(layout(64, "megatron", tp=8), "llama3-70b", "megatron", **job)
    found = job_of_text("launch.sh", made.files["launch.sh"], made.files, cluster=machine(64))
    assert (found.training.cuda_graphs, found.training.trainer_version) == (graphs, None)


KERNEL, GRAPHS, BACKEND = "attention_kernel", "cuda_graphs", "--attention-backend auto"
SHARDED = " --use-distributed-optimizer"


@pytest.mark.parametrize(("old", "new", "training", "stage"), [
    (BACKEND, BACKEND, {KERNEL: "flash", "qk_clip": False}, 1),
    (BACKEND, "--attention-backend flash --qk-clip", {KERNEL: "flash2", "qk_clip": True}, 1),
    (BACKEND, "--attention-backend fused", {KERNEL: "cudnn"}, 1),
    (BACKEND, "--attention-backend unfused", {KERNEL: "unfused"}, 1),
    (BACKEND, "--flash-attention-version 3", {KERNEL: "flash3"}, 1),
    ("--seq-length 8192", "--seq-length 8_192", {"seq_len": 8192}, 1),
    *(
        ("--sequence-parallel", f"--sequence-parallel {words}",
            {GRAPHS: graphs, "trainer_version": None}, 1)
        for words, graphs in (
            ("--enable-cuda-graph", "partial"),
            ("--external-cuda-graph --cuda-graph-scope attn", "partial"),
            ("--enable-cuda-graph --cuda-graph-scope full_iteration", "full"),
            ("--cuda-graph-impl none", None),
            ("--cuda-graph-impl local --cuda-graph-scope full_iteration", "full"),
            ("--cuda-graph-impl local --cuda-graph-scope attn moe_router", "partial"),
            ("--cuda-graph-impl local --cuda-graph-modules attn", "partial"),
            ("--cuda-graph-impl full_iteration", "full"),
        )
    ),
    ("--sequence-parallel", "--sequence-parallel --moe-expert-capacity-factor 1.5",
        {"moe_capacity_factor": None}, 1),  # drops tokens, and routing still sizes the rest
    ("--sequence-parallel", "--sequence-parallel --moe-expert-capacity-factor 1.5 "
        "--moe-pad-expert-input-to-capacity", {"moe_capacity_factor": 1.5}, 1),
    (SHARDED, " --optimizer dist_muon",
        {"optimizer": "muon", "muon_tp_mode": None}, 1),
    (SHARDED, f"{SHARDED} --optimizer muon --muon-tp-mode distributed",
        {"optimizer": "muon", "muon_tp_mode": "distributed"}, 1),
    (SHARDED, " --optimizer muon --muon-tp-mode duplicated",
        {"optimizer": "muon", "muon_tp_mode": "duplicated"}, 0),
])  # fmt: skip
def test_words_of_a_script_mean_a_training(old: str, new: str, training: dict, stage: int) -> None:
    assert old in SCRIPT
    gathered = " --overlap-param-gather" if "optimizer" in training else "nothing"
    text = SCRIPT.replace(gathered, "").replace(old, new)
    job = job_of_text("train.sh", text)
    assert {name: getattr(job.training, name) for name in training} == training
    assert job.layout.zero_stage == stage
    if "qk_clip" in training:
        made = to_megatron(job.layout, job.model, job.cluster, job.training)
        assert ("--qk-clip" in made.arguments) is training["qk_clip"]
    if "optimizer" in training:
        other = job.layout.model_copy(update={"zero_stage": 1 - stage})
        again = job_of_text("train.sh", edited(text, other, "llama3-70b", 256, optimizer="muon"))
        assert (again.training.optimizer, again.layout.zero_stage) == ("muon", 1 - stage)


@pytest.mark.parametrize(("release", "name", "refused"), [
    ("0.16", "dist_muon", {"use-distributed-optimizer", *HIDING}),
    ("0.17", "muon", {"use-distributed-optimizer", *HIDING}),
    ("0.17", "dist_muon", {"use-distributed-optimizer"}),
    ("0.19", "muon", set()),
])  # fmt: skip
def test_muon_is_judged_by_release(release: str, name: str, refused: set[str]) -> None:
    """Core 0.16 and 0.17 assert "Muon optimizer does not support distributed optimizer for now"."""
    flag = " --use-distributed-optimizer"
    text = SCRIPT.replace(flag, f"{flag} --optimizer {name}")
    stated = say(CurrentSpec(name="train.sh", text=text), asked=release)
    found = {fault.field for fault in stated.run(model("llama3-70b"), 64).refusals}
    assert found == {f"--{one}" for one in refused}
