"""The replay against a brute-force twin that plays the same runtime instruction by instruction.

Runtimes: torch's own, recorded by running its `_step_microbatches` with stages that compute
nothing; Megatron's loops, written out; and sends that nobody waits for.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.pipeline.event_simulation import replay
from planner.cost.pipeline.simulate import compiled
from planner.cost.pipeline.stage_costs import StageCosts
from planner.schedules import SCHEDULES, Action, OverlappedPair, Schedule, leaves
from planner.trainers.registry import TRAINERS
from planner.trainers.transports import IDEAL, Transport
from tests.conftest import needed
from tests.pricing import pairs_of
from tests.unit.pipeline_twin import Instruction, Post, Run, Wait, play

SHAPES = [
    (2, 1, 2), (2, 1, 5), (3, 1, 7), (4, 1, 6), (4, 1, 9), (2, 2, 4), (2, 2, 6), (4, 2, 8),
    (3, 2, 6), (3, 3, 6), (2, 4, 6), (4, 5, 8), (3, 2, 8), (4, 2, 5), (4, 3, 10), (5, 2, 5),
    (5, 2, 8), (6, 2, 9),
]  # fmt: skip


class Costs:
    """Random seconds of a step, for both sides."""

    def __init__(self, num_stages: int, seed: int, send: float) -> None:
        draw = np.random.default_rng(seed)
        self.forward, self.input_grad, self.weight_grad = draw.uniform(0.5, 1.5, (3, num_stages))
        self.send = draw.uniform(0.0, send, num_stages)
        self.wire = draw.uniform(0.0, 0.3, (2, num_stages))
        self.cover = draw.uniform(0.1, 0.5, (2, num_stages))

    def seconds(self, action: Action) -> float:
        one, both = {"F": self.forward, "W": self.weight_grad}, self.input_grad + self.weight_grad
        return float({**one, "I": self.input_grad, "B": both}[action.kind][action.stage])

    def pair(self, forward: Action, backward: Action) -> float:
        f, b = forward.stage, backward.stage
        hidden = min(self.wire[0][f], self.cover[1][b]) + min(self.wire[1][b], self.cover[0][f])
        return self.seconds(forward) + self.seconds(backward) - 0.75 * float(hidden)

    def hop(self, kind: str, stage: int) -> float:
        return float(self.send[stage if kind == "F" else stage - 1])

    def columns(self) -> StageCosts:
        one = np.ones((1, len(self.send)))
        return StageCosts(
            forward_seconds_CS=self.forward[None], input_grad_seconds_CS=self.input_grad[None],
            weight_grad_seconds_CS=self.weight_grad[None], send_seconds_CS=self.send[None],
            crowded_seconds_CS=2.0 * self.send[None], saved_bytes_CS=one,
            pair=pairs_of(*(one[None] for one in (*self.wire, *self.cover)), slowdown=0.25),
        )  # fmt: skip


Programs = Sequence[Sequence[Instruction]]
Shape = tuple[int, int, int]


def check(entry: Schedule, shape: Shape, how: Transport, costs: Costs, programs: Programs) -> None:
    """Every item starts and ends as in the twin."""
    order = compiled(entry, *shape, how)
    line = replay(order, costs.columns(), num_microbatches=shape[-1], times=True).timeline
    twin = play(programs)
    times = zip(line.start_seconds_AC[:, 0], line.end_seconds_AC[:, 0], strict=True)
    ours = dict(zip(map(str, line.actions), times, strict=True))
    assert set(twin) == set(ours)
    for label, expected in twin.items():
        assert ours[label] == pytest.approx(expected, abs=1e-9), (label, entry.name, shape)


def legal(names: Sequence[str], runtime: Any = "torch") -> Iterator[tuple[Schedule, Shape]]:
    for name, shape in itertools.product(names, SHAPES):
        if SCHEDULES[name].violation(*shape, runtime) is None:
            yield SCHEDULES[name], shape


def plain_programs(
    entry: Schedule, shape: Shape, costs: Costs, *, seen_through: bool
) -> list[list[Instruction]]:
    """All receives posted at the start, each link a stream; seen through: a wait for each send."""
    pp, v, m = shape
    last = pp * v - 1
    programs: list[list[Instruction]] = []
    home = {stage: int(entry.stage_rank(stage, pp, v)) for stage in range(last + 1)}

    def source(action: Action) -> tuple[str, int, int] | None:
        kind, other = ("F", action.stage - 1) if action.kind == "F" else ("B", action.stage + 1)
        if action.kind == "W" or not 0 <= other <= last or home[other] == home[action.stage]:
            return None
        return kind, other, action.microbatch

    orders = entry.actions(pp, v, m)
    sent: dict[tuple[int, int], list[Any]] = {}
    for rank, order in enumerate(orders):
        program: list[Instruction] = []
        for item in order:
            parts = leaves((item,))
            program += [Wait(tag) for tag in map(source, parts) if tag]
            seconds = costs.pair if isinstance(item, OverlappedPair) else costs.seconds
            program.append(Run(str(item), seconds(*parts)))
            posts = []
            for action in parts:
                kind, step = ("F", 1) if action.kind == "F" else ("B", -1)
                to = action.stage + step
                if action.kind == "W" or not 0 <= to <= last or home[to] == rank:
                    continue
                tag = (kind, action.stage, action.microbatch)
                hop = costs.hop(kind, action.stage)
                posts.append(Post(True, tag, home[to], ("to", home[to]), hop))
                sent.setdefault((rank, home[to]), []).append(tag)
            program += posts
            program += [Wait(post.tag) for post in posts] if seen_through else []
        programs.append(program)
    for (sender, receiver), tags in sent.items():
        programs[receiver][:0] = [Post(False, tag, sender, ("from", sender)) for tag in tags]
    return programs


SENDS = st.sampled_from([0.0, 0.1, 1.0, 3.0])


@settings(max_examples=120)
@given(st.sampled_from(list(legal(list(SCHEDULES)))), st.integers(0, 2**31), SENDS, st.booleans())
def test_sends_queue_on_links(
    which: tuple[Schedule, Shape], seed: int, send: float, seen_through: bool
) -> None:
    (entry, shape), torch = which, TRAINERS["torchtitan"].framework
    costs = Costs(shape[0] * shape[1], seed, send)
    how = torch.transport("ZB-1p", None, overlap=False) if seen_through else IDEAL
    assert how.exposed == ("send" if seen_through else "none")
    check(entry, shape, how, costs, plain_programs(entry, shape, costs, seen_through=seen_through))


def megatron_1f1b(
    rank: int, pp: int, m: int, costs: Costs, *, pair_streams: bool = False
) -> list[Instruction]:
    """forward_backward_pipelining_without_interleaving; pair streams: DeepSpeed's exchange."""
    program: list[Instruction] = []

    def stream(peer: int, tag: Any) -> Any:
        both = frozenset((rank, peer))
        return ("pair", both) if pair_streams else ("way", tag[0], both)

    def exchange(*tags: tuple[bool, tuple[str, int, int], int]) -> None:
        ends = [(s, tag, peer) for s, tag, peer in tags if 0 <= peer < pp]
        posts = [Post(s, t, peer, stream(peer, t), costs.hop(*t[:2])) for s, t, peer in ends]
        ordered = sorted(posts, key=lambda post: post.tag[0] != "F")
        program.extend(ordered if pair_streams else posts)
        program.extend(Wait(post.tag) for post in posts)

    def run(kind: Any, k: int) -> None:
        program.append(Run(f"{rank}{kind}{k}", costs.seconds(Action(rank, kind, k))))

    def f(stage: int, k: int, sends: bool) -> tuple[bool, tuple[str, int, int], int]:
        return sends, ("F", stage, k), (rank + 1 if sends else rank - 1)

    def b(stage: int, k: int, sends: bool) -> tuple[bool, tuple[str, int, int], int]:
        return sends, ("B", stage, k), (rank - 1 if sends else rank + 1)

    warmup = min(pp - rank - 1, m)
    for k in range(warmup):
        exchange(f(rank - 1, k, False))
        run("F", k)
        exchange(f(rank, k, True))
    if warmup < m:
        exchange(f(rank - 1, warmup, False))
    for k in range(m - warmup):
        run("F", warmup + k)
        exchange(f(rank, warmup + k, True), b(rank + 1, k, False))
        run("B", k)
        following = [] if k == m - warmup - 1 else [f(rank - 1, warmup + k + 1, False)]
        exchange(b(rank, k, True), *following)
    for k in range(m - warmup, m):
        exchange(b(rank + 1, k, False))
        run("B", k)
        exchange(b(rank, k, True))
    return program


@pytest.mark.parametrize("trainer", ["megatron", "megatron-deepspeed"])
def test_blocking_1f1b(trainer: str) -> None:
    how = TRAINERS[trainer].framework.transport("1F1B", None, overlap=True)
    for entry, (pp, v, m) in legal(["1F1B"], "megatron"):
        for seed in range(4):
            costs = Costs(pp, seed, 0.7)
            pairs = trainer != "megatron"
            ranks = [megatron_1f1b(rank, pp, m, costs, pair_streams=pairs) for rank in range(pp)]
            check(entry, (pp, v, m), how, costs, ranks)


def megatron_interleaved(
    rank: int, pp: int, v: int, m: int, costs: Costs, *, overlap: bool
) -> list[Instruction]:
    """forward_backward_pipelining_with_interleaving, overlap_p2p_comm or not.

    Without, receives are posted where `recv_tensor_from_previous_stage` says.
    """
    n, last, program = m * v, pp * v - 1, list[Instruction]()
    group = m // max(1, m // pp)

    def chunk(k: int, forward: bool, of: int = rank) -> tuple[int, int]:
        local = k % (group * v) // group
        stage = (local if forward else v - 1 - local) * pp + of
        return stage, k // (group * v) * group + k % group

    def in_of(k: int, forward: bool) -> tuple[tuple[str, int, int], int] | None:
        stage, microbatch = chunk(k, forward)
        source = stage - 1 if forward else stage + 1
        tag = ("F" if forward else "B", source, microbatch)
        return (tag, source % pp) if 0 <= source <= last else None

    def out_of(k: int, forward: bool, of: int = rank) -> tuple[tuple[str, int, int], int] | None:
        stage, microbatch = chunk(k, forward, of)
        target = stage + 1 if forward else stage - 1
        tag = ("F" if forward else "B", stage, microbatch)
        return (tag, target % pp) if 0 <= target <= last else None

    def post(sends: Sequence[Any], receives: Sequence[Any], *, wait: bool) -> None:
        sends, receives = [end for end in sends if end], [end for end in receives if end]
        streams = {peer: ("to", peer) if overlap else None for _, peer in sends}
        posts = [Post(True, tag, peer, streams[peer], crowd(tag)) for tag, peer in sends]
        posts += [Post(False, tag, peer, None) for tag, peer in receives]
        program.extend(posts)
        program.extend(Wait(p.tag) for p in posts if wait)

    def crowd(tag: tuple[str, int, int]) -> float:
        return costs.hop(tag[0], tag[1]) * (2.0 if not overlap and tag in CROWDED else 1.0)

    def run(k: int, forward: bool) -> None:
        stage, microbatch = chunk(k, forward)
        needed = in_of(k, forward)
        if needed and overlap:
            program.append(Wait(needed[0]))
        action = Action(stage, "F" if forward else "B", microbatch)
        program.append(Run(str(action), costs.seconds(action)))

    def nth(k: int, forward: bool) -> list[Any]:
        return [in_of(k, forward)] if k < n else []

    def after(k: int, forward: bool) -> list[Any]:
        """What is received once chunk k ran: for the next one, or round the ring."""
        leading, ending = (0, pp - 1) if forward else (pp - 1, 0)
        if rank != leading:
            return nth(k + 1, forward)
        sent = out_of(k - pp + 1, forward, ending) if k >= pp - 1 else None
        return [(sent[0], ending)] if sent else []

    warmup = min(n, (v - 1) * group + 2 * (pp - 1 - rank))
    post([], nth(0, True), wait=not overlap)
    if overlap:
        post([], nth(0, False), wait=False)
        for k in range(n + warmup):
            if k < n:
                run(k, True)
                post([out_of(k, True)], nth(k + 1, True), wait=False)
            if k >= warmup:
                run(k - warmup, False)
                post([out_of(k - warmup, False)], nth(k - warmup + 1, False), wait=False)
        return program
    for k in range(warmup):
        run(k, True)
        more = nth(0, False) if k == warmup - 1 and warmup < n else []
        post([out_of(k, True)], after(k, True) + more, wait=True)
    for k in range(n - warmup):
        run(warmup + k, True)
        run(k, False)
        received = after(warmup + k, True) + after(k, False)
        post([out_of(warmup + k, True), out_of(k, False)], received, wait=True)
    if warmup == n:
        post([], nth(0, False), wait=True)
    for k in range(n - warmup, n):
        run(k, False)
        post([out_of(k, False)], after(k, False), wait=True)
    return program


CROWDED: set[tuple[str, int, int]] = set()


def crowded_tags(pp: int, v: int, m: int, costs: Costs) -> set[tuple[str, int, int]]:
    """Transfers whose sender sends, or whose receiver receives, another in the same exchange."""
    found = set()
    for rank in range(pp):
        batch: list[Post] = []
        program = megatron_interleaved(rank, pp, v, m, costs, overlap=False)
        for instruction in [*program, Run("", 0.0)]:
            if isinstance(instruction, Post):
                batch.append(instruction)
            elif isinstance(instruction, Run):
                for way in (True, False):
                    same = [post.tag for post in batch if post.sends is way]
                    found |= set(same) if len(same) > 1 else set()
                batch = []
    return found


@pytest.mark.parametrize("overlap", [True, False])
def test_megatron_interleaved(overlap: bool) -> None:
    how = TRAINERS["megatron"].framework.transport("Interleaved1F1B", None, overlap=overlap)
    assert (how.receive, how.synchronises) == (("ahead", False) if overlap else ("turn", True))
    compared = 0
    for entry, (pp, v, m) in legal(["Interleaved1F1B"], "megatron"):
        for seed in range(3):
            costs = Costs(pp * v, seed, 0.7)
            CROWDED.clear()
            CROWDED.update(crowded_tags(pp, v, m, costs))
            made = (megatron_interleaved(r, pp, v, m, costs, overlap=overlap) for r in range(pp))
            ranks = list(made)
            check(entry, (pp, v, m), how, costs, ranks)
            compared += 1
    assert compared >= 15


# Who sends an activation or a gradient to a stage one on: from this one, or to it.
MOVED = {
    "get_fwd_send_ops": (True, "F", 0, 1),
    "get_fwd_recv_ops": (False, "F", -1, 1),
    "get_bwd_send_ops": (True, "B", 0, -1),
    "get_bwd_recv_ops": (False, "B", 1, -1),
}


class RecordingStage:
    """Stands in for a PipelineStage: operations that say what they move, and noted compute."""

    def __init__(
        self, index: int, num_stages: int, rank: int, home: Callable[[int], int], log: list[Any]
    ) -> None:
        self.stage_index, self.num_stages, self.group_rank = index, num_stages, rank
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.has_backward, self.submod, self.home, self.log = True, None, home, log

    def _op(self, sends: bool, kind: str, source: int, by: int, microbatch: int) -> list[Any]:
        import torch.distributed as dist

        target = source + by
        other = target if sends else source
        if not 0 <= other < self.num_stages or self.home(source) == self.home(target):
            return []
        op = dist.isend if sends else dist.irecv
        tag = (kind, source, microbatch)
        return [SimpleNamespace(op=op, sends=sends, tag=tag, peer=self.home(other))]

    def forward_one_chunk(self, k: int, *_: Any, **__: Any) -> None:
        self.log.append(Action(self.stage_index, "F", k))

    def backward_one_chunk(self, k: int, full_backward: bool = True, **_: Any) -> None:
        self.log.append(Action(self.stage_index, "B" if full_backward else "I", k))

    def backward_weight_one_chunk(self, k: int, **_: Any) -> None:
        self.log.append(Action(self.stage_index, "W", k))

    def __getattr__(self, name: str) -> Any:
        if name not in MOVED:
            return lambda *_, **__: []
        sends, kind, source, target = MOVED[name]
        return lambda k: self._op(sends, kind, self.stage_index + source, target, k)


def overlap_like_torchtitan(action: Any, context: Any) -> None:
    """torchtitan's overlap_callback: both receives are waited for, then both run as one."""
    from torch.distributed.pipelining import schedules

    runtime = context.schedule_ref
    forward, backward = action.sub_actions
    for ops, sub in ((runtime.fwd_recv_ops, forward), (runtime.bwd_recv_ops, backward)):
        schedules._wait_batch_p2p(ops.pop((sub.stage_index, sub.microbatch_index), []))
    pair = OverlappedPair(
        Action(forward.stage_index, "F", forward.microbatch_index),
        Action(backward.stage_index, "B", backward.microbatch_index),
    )
    runtime._stages[0].log.append(pair)


NOT_PLAYED = ("_initialize_stage", "_initialize_stages")
NOT_PLAYED += ("_maybe_compute_loss", "_maybe_get_loss", "_update_losses")


def recorded(
    entry: Schedule, shape: Shape, costs: Costs, monkeypatch: pytest.MonkeyPatch
) -> list[list[Instruction]]:
    """What torch's schedule class asks of each rank, with its posts, batches and waits."""
    from torch.distributed.pipelining import schedules

    pp, v, m = shape
    log: list[Any] = []

    def batch(ops: Any, desc: Any = None) -> list[Any]:
        log.append(list(ops))
        return [op.tag for op in ops]

    monkeypatch.setattr(schedules, "_batch_p2p", batch)
    monkeypatch.setattr(schedules, "_wait_batch_p2p", lambda tags: log.extend(map(Wait, tags)))
    kind = schedules.get_schedule_class(entry.name)
    for name in NOT_PLAYED:
        monkeypatch.setattr(kind, name, lambda *_, **__: None, raising=False)
    programs = []
    for rank in range(pp):
        log.clear()
        home = {s: int(entry.stage_rank(s, pp, v)) for s in range(pp * v)}
        own = [s for s in range(pp * v) if home[s] == rank]
        stages = [RecordingStage(s, pp * v, rank, home.__getitem__, log) for s in own]
        for one in stages:
            one.group_size = pp
        built = kind(stages[0] if entry.single_stage else stages, m, loss_fn=lambda *_: None)
        if hasattr(built, "register_custom_function"):
            built.rank = rank
            built.register_custom_function(schedules.OVERLAP_F_B, overlap_like_torchtitan)
        built._step_microbatches([()] * m, [{}] * m, None, None)
        programs.append(list(instructions(log, rank, costs)))
    return programs


def instructions(log: Sequence[Any], rank: int, costs: Costs) -> Iterator[Instruction]:
    """Sends alone or receives alone go out one by one on their pair's stream; mixed as one."""
    for entry in log:
        if isinstance(entry, list):
            mixed = len({op.sends for op in entry}) > 1
            for op in entry:
                stream = None if mixed else frozenset((rank, op.peer))
                yield Post(op.sends, op.tag, op.peer, stream, costs.hop(*op.tag[:2]))
        elif isinstance(entry, Wait):
            yield entry
        elif isinstance(entry, OverlappedPair):
            yield Run(str(entry), costs.pair(*entry))
        else:
            yield Run(str(entry), costs.seconds(entry))


@pytest.mark.torch
@pytest.mark.parametrize("name", [
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble",
    "DualPipeV",
])  # fmt: skip
def test_torchs_runtimes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed("torch")
    how = TRAINERS["torchtitan"].framework.transport(name, None, overlap=True)
    compared = 0
    for entry, shape in legal([name]):
        for seed, send in ((0, 0.05), (1, 0.7), (2, 3.0)):
            costs = Costs(shape[0] * shape[1], seed, send)
            check(entry, shape, how, costs, recorded(entry, shape, costs, monkeypatch))
            compared += 1
    assert compared >= 6
