"""Parts of the probe program that need torch but no second process."""

import itertools
import math
import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from planner.catalog.models import model_names
from planner.errors import SpecError
from planner.intake.jobs import read_job
from planner.intake.models import read_model
from planner.probes.protocol import ProbeTask
from planner.trainers.registry import resolve_layout
from tests.conftest import job_values, needed
from tests.e2e.probe_jobs import task

torch = needed("torch")
needed("planner.probes.reference.run")  # and with it all of its parts
ref = needed("planner.probes.reference")
pytestmark = pytest.mark.torch


def recipe(layout: dict[str, Any], **options: Any) -> Any:
    return ref.recipe.ReferenceRecipe.of(ProbeTask.model_validate(task(layout, **options)))


@pytest.mark.parametrize("name", model_names())
def test_every_catalogue_model_is_built_with_its_parameters(name: str) -> None:
    spec = read_model(name)
    if spec.unusual:  # refused by name before a probe starts
        layout = {"dp_shard": 8}
        job = read_job(job_values(name, "h100-sxm-80gb", 8, 64, 8, layout=layout, trainer="fsdp"))
        refused = ref.recipe.refusal(job, job.layout, "cuda")
        assert "which the reference program does not have" in refused
        return
    every = tuple(range(spec.num_hidden_layers))
    with torch.device("meta"):
        part = ref.model.ModelPart(layers=every, first=True, last=True)
        model = ref.model.Transformer(spec, part, unfused=False, seq_len=64)
    built = [*model.parameters(), *model.buffers()]
    assert sum(tensor.numel() for tensor in built) == spec.total_parameters()


PIPELINE = {"pp": 2, "dp_shard": 1}
ZBV = {**PIPELINE, "pp_schedule": "ZBVZeroBubble"}
TITAN = {"trainer": "torchtitan", "trainer_version": "0.3"}
FAKE = {"emulate_rank": 0, "fake_tensors": True}


@pytest.mark.parametrize(("field", "layout", "options"), [
    ("dp_shard", {"dp_shard": 3}, {"num_gpus": 4}),
    ("pp_schedule", {**PIPELINE, "pp_schedule": "ZB-1p"}, {"num_gpus": 2}),
    ("zero_stage", {"zero_stage": 1}, {}), ("fake_tensors", {}, {"fake_tensors": True}),
    ("emulate_rank", {}, {"emulate_rank": 1}),
    ("ac", {"compile": True, "ac": "memory-budget-0.5"}, FAKE),
    ("ac", {**ZBV, "ac": "selective-op"}, {"num_gpus": 2}),
    ("zero_stage", {**ZBV, "dp_shard": 2, "zero_stage": 3}, {"num_gpus": 4}),
    ("cpu_offload", {"dp_shard": 2, "zero_stage": 3, "cpu_offload": True}, {"num_gpus": 2}),
    ("trainer", {"param_dtype": "bfloat16"}, {"training": {"trainer": "megatron"}}),
    ("seq_len", {}, {"model": "tied", "training": {"seq_len": 2048}}),
    ("overlap", {}, {"training": {"overlap": {"dp": False}}}),
    ("chunked_loss", {}, {"training": {"chunked_loss": True}}),
    ("fused_cross_entropy", {}, {"training": {"fused_cross_entropy": True}}),
    ("ac", {"ac": "modules-mlp"}, {}),
    ("cuda_graphs", {}, {"training": {"cuda_graphs": "full", **TITAN}}),
])  # fmt: skip
def test_what_cannot_run_is_refused_with_its_field(
    field: str, layout: dict[str, Any], options: dict[str, Any]
) -> None:
    with pytest.raises(SpecError, match=field):
        recipe(layout, **options)


@pytest.mark.parametrize("method", ["allgather", "alltoall", "ulysses"])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_context_ranks_share_the_sequence_and_its_causal_work(method: str, degree: int) -> None:
    parts = [ref.context_parallel.positions_of(rank, degree, 64, method) for rank in range(degree)]
    assert sorted(torch.cat(parts).tolist()) == list(range(64))
    work = [int((part + 1).sum()) for part in parts]
    assert method == "ulysses" or len(set(work)) == 1


def test_a_sequence_is_the_same_whoever_holds_it() -> None:
    def batch(step: int, replica: int, size: int, **options: Any) -> Any:
        given = recipe({"dp_shard": 8 // size}, num_gpus=8 // size, **options)
        return ref.initialise.batch(
            given, step, replica, torch.arange(32), torch.device("cpu"), size
        )

    whole, targets = batch(3, 0, 8)
    assert torch.equal(whole, torch.cat([batch(3, replica, 4)[0] for replica in range(2)]))
    assert torch.equal(whole[:, 1:], targets[:, :-1])
    assert not torch.equal(whole, batch(4, 0, 8)[0])
    assert not torch.equal(whole, batch(3, 0, 8, seed=1)[0])


def test_regrouping_puts_each_expert_together_and_fills_up() -> None:
    counts = torch.tensor([[2, 1, 0], [1, 3, 0]])  # two source ranks, three experts
    at, ends = ref.moe.regrouping(counts, 7, 4)
    assert ends.tolist() == [4, 8, 8]
    # rows as they came: rank 0 expert 0 (2), expert 1 (1); rank 1 expert 0 (1), expert 1 (3)
    assert at.tolist() == [0, 1, 4, 2, 5, 6, 7]
    assert ref.moe.regrouping(counts, 7, 1)[0].tolist() == [0, 1, 3, 2, 4, 5, 6]


@pytest.mark.parametrize(("imbalance", "ranks"), [(1.0, 4), (1.5, 4), (2.0, 2)])
def test_assigned_tokens_load_the_first_rank_as_asked(imbalance: float, ranks: int) -> None:
    ep = SimpleNamespace(size=lambda: ranks)
    axes = ref.moe.ExpertAxes(ep=ep, assigned_imbalance=imbalance)
    layer = SimpleNamespace(top_k=2, num_experts=8, axes=axes)
    chosen = ref.moe.MixtureOfExperts._assigned(layer, torch.zeros(4096, 1))
    loads = torch.bincount(chosen.flatten(), minlength=8).float().reshape(ranks, -1)
    assert chosen.shape == (4096, 2)
    assert float(loads.sum(1)[0] / loads.sum(1).mean()) == pytest.approx(imbalance, rel=0.01)
    assert float(loads.max() / loads[0].mean()) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("bias", [False, True])
def test_grouped_experts_compute_what_a_loop_does_and_never_ask_the_device(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of two ranks; in bf16 no count reaches the host, and in fp32 experts run in turn."""
    spec = read_model({"base": "mixtral-8x7b", "hidden_size": 16, "intermediate_size": 32,
                       "num_local_experts": 4,
                       "num_attention_heads": 4, "num_key_value_heads": 4})  # fmt: skip
    spec = spec.model_copy(update={"expert_bias": bias})
    experts = ref.moe.GroupedExperts(spec)
    torch.manual_seed(0)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rows, counts = torch.randn(37, 16), torch.tensor([[0, 10, 1, 6], [0, 10, 0, 10]])
    chosen = torch.arange(4).repeat_interleave(counts.sum(0))[torch.randperm(37)]
    outs = []
    for dtype in (torch.float32, torch.bfloat16):
        if dtype == torch.bfloat16:
            for name in ("tolist", "item", "__int__", "__bool__"):
                monkeypatch.setattr(torch.Tensor, name, None)
        entered = rows.clone().to(dtype).requires_grad_()
        experts.zero_grad()
        out = experts.to(dtype)(entered, counts)
        out.float().square().sum().backward()
        assert experts.w1.grad is not None
        load = ref.moe.load_of(chosen, 4)
        monkeypatch.undo()
        assert load.equal(counts.sum(0))
        outs.append([one.detach().float() for one in (out, entered.grad, experts.w1.grad.clone())])
    for one, other in zip(*outs, strict=True):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.1 * float(one.abs().max()))


@pytest.mark.parametrize(
    ("copies", "experts", "ranks", "share"), [(64, 8, 4, 1.0), (10, 8, 2, 1.5), (7, 4, 4, 1.25)]
)
def test_assumed_routing_is_balanced_but_for_the_busiest_rank(
    copies: int, experts: int, ranks: int, share: float
) -> None:
    counts = ref.moe.Counts.assumed(copies, experts, ranks, share, torch.device("cpu"))
    assert sum(counts.rows_sent) == copies
    assert sum(counts.rows_received) == round(copies * share)
    assert counts.received.sum(1).tolist() == counts.rows_received
    assert counts.received.max() - counts.received.min() <= 1
    assert counts.received.shape == (ranks, experts // ranks)


def sequence(length: int) -> Any:
    positions = torch.arange(length)
    return ref.attention_kernels.Sequence(positions, positions, positions)


@pytest.mark.parametrize(("kv_heads", "value_width", "window", "sunk"), [
    (4, 16, 0, False), (2, 16, 0, False), (4, 8, 0, False), (2, 16, 5, False), (2, 16, 0, True),
    (4, 16, 5, True),
])  # fmt: skip
def test_cpu_attention_is_softmax(kv_heads: int, value_width: int, window: int, sunk: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 24, width)
        for heads, width in ((4, 16), (kv_heads, 16), (kv_heads, value_width))
    )
    sinks = torch.randn(4) if sunk else None
    results = []
    for unfused in (False, True):
        core = ref.attention_kernels.AttentionCore(window=window, unfused=unfused, has_sinks=sunk)
        core.sequence = sequence(24)
        given = [q, k, v, *([sinks] if sinks is not None else [])]
        leaves = [x.clone().requires_grad_() for x in given]
        out = core(*leaves)
        out.square().sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for fused, plain in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)


def test_cpu_norm_is_torchs() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 16)
    results = []
    for norm in (ref.norms.RmsNorm(16, eps=1e-5), torch.nn.RMSNorm(16, eps=1e-5)):
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(0.5, 2.0, 16))
        leaf = x.clone().requires_grad_()
        out = norm(leaf)
        out.pow(3).sum().backward()
        results.append((out.detach(), leaf.grad, norm.weight.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def stepped(optimizer: Any, parameter: Any, shrink: float = 1.0) -> Any:
    torch.manual_seed(1)
    for index in range(4):
        parameter.grad = torch.randn_like(parameter) * shrink**index
        optimizer.step()
    return parameter.detach().clone()


def start() -> Any:
    return torch.nn.Parameter(torch.linspace(-1, 1, 64).reshape(8, 8))


def test_adamw_with_bf16_states_follows_adamw_and_keeps_half() -> None:
    ours, plain = start(), start()
    optimizer = ref.optimizers.AdamWBf16States([ours], lr=1e-3)
    (adamw,) = ref.optimizers.build([("layers.0.w", plain)], "adamw", 1e-3)
    both = (stepped(optimizer, ours), stepped(adamw, plain))
    torch.testing.assert_close(*both, rtol=0, atol=3e-5)
    assert not torch.equal(ours, start())
    states = [one for one in optimizer.state[ours].values() if isinstance(one, torch.Tensor)]
    assert {state.dtype for state in states} == {torch.bfloat16}


def test_adafactor_is_torchs() -> None:
    ours, torchs = start(), start()
    # torch scales the step by the parameter's size and has its learning rate shrink; both are
    # switched off to compare
    adafactor = torch.optim.Adafactor([torchs], lr=1e-3, eps=(1e-30, 1.0))
    mine = stepped(ref.optimizers.Adafactor([ours], lr=1e-3), ours, 0.3)
    torch.testing.assert_close(mine, stepped(adafactor, torchs, 0.3), rtol=0, atol=1e-6)
    assert not torch.equal(mine, start())


def test_muon_takes_matrices_of_blocks_alone() -> None:
    names = ["tok_embeddings.weight", "layers.0.w1.weight", "layers.0.norm.weight"]
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in ((8, 4), (4, 4), (4,))]
    muon, adam = ref.optimizers.build(list(zip(names, parameters, strict=True)), "muon", 1e-3)
    assert [p is parameters[1] for p in muon.param_groups[0]["params"]] == [True]
    assert len(adam.param_groups[0]["params"]) == 2


def test_selective_op_keeps_every_second_product_and_never_the_router() -> None:
    x, square, router = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8, 3)
    forward, _ = ref.checkpointing.op_contexts(8, 3)()
    with forward:
        for weight in (square, router, square, square):
            torch.mm(x, weight)
    stored = forward.storage[torch.ops.aten.mm.default]  # for each product
    kept = ["Version" in repr(stored[index]) for index in sorted(stored)]
    assert kept == [True, False, False, True]


def test_tracker_counts_live_storages_rounded_up() -> None:
    with ref.memory.Tracker() as tracker:
        a = torch.zeros(100)  # 400 bytes
        b = a.view(10, 10)
        assert tracker.live == 512
        c = torch.ones(1000)  # 4000 bytes
        assert tracker.live == 512 + 4096
        del c
        assert (tracker.live, tracker.peak) == (512, 512 + 4096)
        tracker.reset()
        assert tracker.peak == 512
        b.untyped_storage().resize_(0)
        assert tracker.live == 0
        b.untyped_storage().resize_(400)
        assert tracker.live == 512
        del a, b
        assert tracker.live == 0
    assert torch.UntypedStorage.resize_ is tracker._resize


def test_memory_of_a_gpu_tells_what_was_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "mem_get_info": (10, 100), "memory_reserved": 60, "max_memory_allocated": 50,
        "max_memory_reserved": 70, "memory_stats": {"num_alloc_retries": 2},
    }  # fmt: skip
    for name, value in said.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    found = ref.memory.of_gpu(3, torch.device("cuda"), 5, 7)
    assert (found.rank, found.communicator_bytes, found.allocator_retries) == (3, 25, 2)
    peaks = (found.peak_allocated_bytes, found.peak_reserved_bytes, found.device_used_bytes)
    assert peaks == (57, 77, 97)


def test_tracker_counts_products() -> None:
    with ref.memory.Tracker() as tracker:
        torch.randn(4, 8) @ torch.randn(8, 16)
        q = torch.randn(1, 2, 6, 4)
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert tracker.flops == 2 * 4 * 8 * 16 + 2 * (2 * 2 * 6 * 6 * 4)


def test_a_windows_mask_is_built_by_a_compiled_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eagerly it holds all pairs of tokens: 10.7 GB for 32,768 of them."""
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda built: compiled.append(built.__name__) or built)
    mask = sequence(256).block_mask(16)
    assert compiled == ["create_block_mask"]
    assert mask.shape[-2:] == (256, 256)


@pytest.mark.parametrize("wanted", [True, False])
def test_the_worker_sets_the_allocator_under_both_names_before_torch_reads_it(
    wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from planner.probes.worker import _set_allocator

    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
    _set_allocator(wanted, "torchtitan")
    value = f"expandable_segments:{wanted}"
    assert os.environ["PYTORCH_ALLOC_CONF"] == os.environ["PYTORCH_CUDA_ALLOC_CONF"] == value
    assert ref.environment.describe(torch.device("cpu")).allocator == value


@pytest.mark.parametrize(("line", "found"), [
    ("1980, 698.23, 0x0000000000000004\n", (1.98e9, 698.23, False)),  # at its power cap
    ("1200, [N/A], 0x0000000000000020", (1.2e9, "absent", True)),
    ("[N/A], [N/A], [Not Supported]", ("absent", "absent", "absent")),
])  # fmt: skip
def test_a_line_of_nvidia_smi(line: str, found: tuple[Any, ...]) -> None:
    query = ref.environment.parse_query(f"550.54.15, {line}")
    assert query.pop("driver") == "550.54.15"
    names = ("sm_clock_hertz", "power_watts", "throttled")
    assert {*query} <= {*names}
    assert tuple(query.get(name, "absent") for name in names) == found


def test_readings_are_taken_while_it_works_and_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten readings of a stand-in for NVML, one of them throttled by heat."""
    steps, enough = itertools.count(), threading.Event()

    def clock(handle: object, kind: int) -> int:
        step = next(steps)
        if step >= 9:
            enough.set()
        return 1980 if step % 2 else 1780

    nvml = SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid, nvmlSystemGetDriverVersion=lambda: b"580.1",
        nvmlDeviceGetClockInfo=clock, nvmlDeviceGetPowerUsage=lambda handle: 650_000,
        nvmlDeviceGetTemperature=lambda handle, kind: 63,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x20,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: range(2 if enough.is_set() else 1),
        NVML_CLOCK_SM=1, NVML_TEMPERATURE_GPU=0,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(ref.environment, "READ_SECONDS", 0.0)
    monkeypatch.setattr(ref.environment, "_uuid", lambda device: "GPU-1")
    sample = ref.environment.Sample(torch.device("cuda"))
    sample.start()
    assert enough.wait(60)
    sample.stop()
    found = dict(sample.values)
    assert 1.78e9 < found.pop("sm_clock_hertz") < 1.98e9
    assert found == {**found, "driver": "580.1", "power_watts": 650.0, "temperature_celsius": 63.0}
    assert (found["throttled"], found["intruded"]) == (True, True)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    asked = {"driver": "asked once"}
    monkeypatch.setattr(ref.environment.Sample, "_by_command", lambda self: asked)
    silent = ref.environment.Sample(torch.device("cuda"))
    silent.take()
    assert silent.values == asked


def test_without_torchao_float8_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchao", "torchao.float8"):
        monkeypatch.setitem(sys.modules, name, None)
    layout = resolve_layout({"precision": "float8-rowwise"}, trainer="torchtitan", num_gpus=1)
    with pytest.raises(ImportError, match=r"layout\.precision=float8-rowwise needs torchao"):
        ref.precision.apply(torch.nn.Linear(1, 1), layout, emulate=True)


@pytest.mark.parametrize(("layout", "per_rank", "expected"), [
    ({}, 8, None), ({}, 64, (2, 4)), (PIPELINE, 16, None), (PIPELINE, 64, (4, 8)),
    ({**PIPELINE, "pp_schedule": "Interleaved1F1B", "virtual_stages": 2}, 64, (4, 8)),
    (PIPELINE, 65, (4, 8)), ({**PIPELINE, "pp_schedule": "GPipe"}, 64, None),
])  # fmt: skip
def test_two_short_steps_are_timed(layout: dict[str, Any], per_rank: int, expected: Any) -> None:
    gpus = layout.get("pp", 1)
    given = recipe(layout, num_gpus=gpus, training={"global_batch_size": per_rank})
    assert given.timed_microbatches() == expected


class Stepping:
    """Steps on a clock of its own: an update, and each microbatch."""

    def __init__(self, batch: int, *, device: str = "cpu", **options: Any) -> None:
        training = {"global_batch_size": batch}
        self.recipe = recipe({}, training=training, **options)
        self.device, self.now = SimpleNamespace(type=device), 100.0
        self.sizes: list[int] = []

    def step(self, index: int, microbatches: int) -> tuple[Any, None]:
        self.sizes.append(microbatches)
        self.now += 0.5 + 0.25 * microbatches
        return 1.0, None

    def global_loss(self, share: float) -> float:
        return share

    def expert_imbalance(self) -> list[float]:
        return []

    def run(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setattr(ref.timing, "_mark", lambda device: self.now)
        monkeypatch.setattr(ref.timing, "_wait", lambda device: None)
        monkeypatch.setattr(ref.timing, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(ref.timing.dist, "get_world_size", lambda: 1)
        return ref.timing.run(self, lambda: None, 100.0)  # type: ignore[arg-type]


def test_a_long_step_follows_from_two_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    long = Stepping(64, spread_below=0.0, steps=7)
    found = long.run(monkeypatch)
    assert found.microbatches == (2, 4)
    assert found.seconds == pytest.approx([0.5 + 0.25 * 64] * 7)
    assert long.sizes == [2, 4] * 3 + [2] * 5 + [4] * 5 + [2] * 2 + [4] * 2
    short = Stepping(8)
    assert short.run(monkeypatch).seconds == pytest.approx([2.5] * 5), "they agree"
    assert set(short.sizes) == {8}


def test_timing_lasts_on_a_gpu_and_ends_before_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    lasting = Stepping(8, device="cuda", least_seconds=30.0).run(monkeypatch)
    assert len(lasting.seconds) == 15, "12 steps are 30 s"
    ended = Stepping(8, steps=1000, spread_below=0.0, time_limit_seconds=60.0)
    assert len(ended.run(monkeypatch).seconds) == 13, "42 s less 3 steps to warm up"
    hasty = Stepping(8, steps=1000, spread_below=0.0, time_limit_seconds=6.0)
    assert len(hasty.run(monkeypatch).seconds) == 1, "one to warm up, one timed"


def test_timing_spread() -> None:
    one, equal, apart = (
        ref.timing.StepTiming(seconds=each) for each in ([1.0], [1.0, 1.0], [1.0, 3.0, 2.0])
    )
    assert (one.spread, equal.spread, apart.median) == (math.inf, 0.0, 2.0)
