"""A pipeline played out event by event, rank by rank: the brute-force twin of
`planner.cost.pipeline.event_simulation`.

Each rank runs a list of instructions in order. A transfer needs its send and its receive posted and
both at the head of their streams; a stream is a queue of what its rank posted there. Nothing here
knows of schedules, levels or lowering.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

Tag = tuple[str, int, int]
"""What travels: ("F" or "B", stage that computed it, microbatch)."""


@dataclass(frozen=True)
class Run:
    """Compute for some seconds."""

    label: str
    seconds: float


@dataclass(frozen=True)
class Post:
    """Offer one end of a transfer on a stream (None: nothing queues behind it) and go on."""

    sends: bool
    tag: Tag
    peer: int
    stream: Hashable | None
    seconds: float = 0.0


@dataclass(frozen=True)
class Wait:
    """Stand still until the transfer has ended."""

    tag: Tag


Instruction = Run | Post | Wait
End = tuple[int, Hashable | None, float]
Stream = tuple[int, Hashable]


@dataclass
class _World:
    programs: Sequence[Sequence[Instruction]]
    position: list[int]
    events: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    count: int = 0
    ended: dict[Tag, float] = field(default_factory=dict)
    waiting: dict[Tag, list[int]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[Tag, dict[bool, End]] = field(default_factory=lambda: defaultdict(dict))
    queues: dict[Stream, deque[Tag]] = field(default_factory=lambda: defaultdict(deque))
    running: set[Tag] = field(default_factory=set)
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)

    def at(self, time: float, action: Callable[[float], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, action))

    def step(self, rank: int, now: float) -> None:
        """Goes on until the rank computes, waits or is done."""
        program = self.programs[rank]
        while self.position[rank] < len(program):
            instruction = program[self.position[rank]]
            self.position[rank] += 1
            if isinstance(instruction, Run):
                self.spans[instruction.label] = (now, now + instruction.seconds)
                self.at(now + instruction.seconds, lambda time: self.step(rank, time))
                return
            if isinstance(instruction, Post):
                end = (rank, instruction.stream, instruction.seconds)
                self.ends[instruction.tag][instruction.sends] = end
                if instruction.stream is not None:
                    self.queues[rank, instruction.stream].append(instruction.tag)
                self.begin(now)
            elif instruction.tag not in self.ended:
                self.waiting[instruction.tag].append(rank)
                return

    def begin(self, now: float) -> None:
        for tag, both in self.ends.items():
            ready = len(both) == 2 and tag not in self.running
            if ready and all(self._at_head(tag, *end) for end in both.values()):
                self.running.add(tag)
                self.at(now + both[True][2], lambda time, tag=tag: self.finish(tag, time))

    def _at_head(self, tag: Tag, rank: int, stream: Hashable | None, _: float) -> bool:
        return stream is None or self.queues[rank, stream][0] == tag

    def finish(self, tag: Tag, now: float) -> None:
        self.ended[tag] = now
        for rank, stream, _ in self.ends.pop(tag).values():
            if stream is not None:
                assert self.queues[rank, stream].popleft() == tag
        self.begin(now)
        for rank in self.waiting.pop(tag, []):
            self.step(rank, now)


def play(programs: Sequence[Sequence[Instruction]]) -> Mapping[str, tuple[float, float]]:
    """(start, end) of every `Run` by its label. Raises RuntimeError where ranks wait for good."""
    world = _World(programs=programs, position=[0] * len(programs))
    for rank in range(len(programs)):
        world.at(0.0, lambda time, rank=rank: world.step(rank, time))
    while world.events:
        time, _, action = heapq.heappop(world.events)
        action(time)
    stuck = [rank for rank, program in enumerate(programs) if world.position[rank] < len(program)]
    if stuck:
        raise RuntimeError(f"ranks {stuck} wait for good")
    return world.spans
