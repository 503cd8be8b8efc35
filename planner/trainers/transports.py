"""How each trainer's runtime moves activations and gradients between pipeline ranks.

The simulator follows the rows of these tables. A transfer needs both ends: NCCL moves more than its
buffers hold only once the receiver has posted its receive, and the receive waits for the compute
that was launched before it (ProcessGroupNCCL::pointToPoint, syncStream).
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from planner.schedules.base import Exposed

Receive = Literal["free", "needed", "ahead", "lowered", "turn"]
Waits = Literal["none", "fused", "all"]
Stream = Literal["link", "pair"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """How one runtime transfers.

    receive: when a rank posts a receive.
        free: it never holds up the sender.
        needed: when everything that the rank had to do before is done.
        ahead: when its previous forward (for a forward's input) or backward is done.
        lowered: where torch's lowering pass puts it.
        turn: with all sends of the turn just done; a turn is one forward and the backward after it,
        or one of them alone.
    waits: sends that a rank waits for before its next action.
        all: every one.
        fused: one that goes out in a batch with the receive of the next action, from the same
        neighbour; it waits for the others before the action after its next.
        none: none.
    stream: what transfers queue on.
        link: neighbours, one direction.
        pair: neighbours, both directions.
    synchronises: the host waits for the GPU after each exchange and must then launch again.
    splits: where ranks of a tensor-parallel group hold the same activation, each sends its share
        and the receivers gather it.
    """

    receive: Receive
    waits: Waits
    stream: Stream
    synchronises: bool = False
    splits: bool = False
    source: str = field(compare=False)

    @property
    def exposed(self) -> Exposed:
        """Part of the sends that a schedule cannot hide.

        "none": only chains of sends. "receive": receives that are posted late. "send": sends that a
        rank waits for. "turn": whole turns.
        """
        if self.receive == "turn":
            return "turn"
        if self.receive in ("needed", "lowered"):
            return "receive"
        return "none" if self.waits == "none" else "send"


IDEAL = Transport(
    receive="free",
    waits="none",
    stream="link",
    source="an abstraction: sends that nobody waits for, one after the other",
)
_TORCH_GPIPE = Transport(
    receive="needed", waits="none", stream="link",
    source="torch 2.13 pipelining/schedules.py ScheduleGPipe: irecv and wait before each chunk; "
        "sends are waited for at the end",
)  # fmt: skip
_TORCH_1F1B = Transport(
    receive="needed",
    waits="fused",
    stream="link",
    source="torch 2.13 pipelining/schedules.py Schedule1F1B: fwd_send_bwd_recv and "
    "bwd_send_fwd_recv "
    "as one batch_isend_irecv",
)
_TORCH_RUNTIME = Transport(
    receive="lowered", waits="none", stream="pair",
    source="torch 2.13 pipelining/schedules.py _add_send_recv, _PipelineScheduleRuntime; "
        "ProcessGroupNCCL: one stream a pair of ranks",
)  # fmt: skip
_MEGATRON_BLOCKING = Transport(
    receive="needed", waits="all", stream="link", synchronises=True,
    source="Megatron-LM core pipeline_parallel/schedules.py "
        "forward_backward_pipelining_without_interleaving; batch_p2p_sync",
)  # fmt: skip
_MEGATRON_OVERLAPPED = Transport(
    receive="ahead", waits="none", stream="link",
    source="Megatron-LM core pipeline_parallel/schedules.py "
        "forward_backward_pipelining_with_interleaving, overlap_p2p_comm",
)  # fmt: skip
_MEGATRON_TURNS = Transport(
    receive="turn", waits="all", stream="link", synchronises=True,
    source="the same without overlap_p2p_comm: send_forward_backward_recv_forward_backward",
)  # fmt: skip
_ZERO_BUBBLE = Transport(
    receive="lowered", waits="none", stream="link",
    source="sail-sg/zero-bubble-pipeline-parallelism zb_schedules.py: receives placed in the "
        "schedule, waited for before use",
)  # fmt: skip
_SEEN_THROUGH = Transport(
    receive="free",
    waits="all",
    stream="link",
    source="overlap switched off where the runtime has no switch: ranks see each send through",
)

_OLD_MEGATRON = ("2021", "2022", "2023")
ONE_STAGE = frozenset({"1F1B", "GPipe"})
_ZERO_BUBBLE_SCHEDULES = frozenset({"ZB-1p", "ZB-2p"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportRow:
    """A transport and the runs that use it.

    schedules: those it moves; None for all.
    years: of the trainer's version, where that is a date; empty for all.
    overlapped: only where the run left overlap of sends on.
    """

    transport: Transport
    schedules: frozenset[str] | None = None
    years: tuple[str, ...] = ()
    overlapped: bool = False

    def holds(self, schedule: str, year: str, overlap: bool) -> bool:
        """Whether a run may use this row; it uses the first row that holds."""
        ours = self.schedules is None or schedule in self.schedules
        return ours and (not self.years or year in self.years) and (overlap or not self.overlapped)


TORCH_ROWS = (
    TransportRow(schedules=frozenset({"GPipe"}), transport=_TORCH_GPIPE),
    TransportRow(schedules=ONE_STAGE, transport=_TORCH_1F1B),
    TransportRow(overlapped=True, transport=_TORCH_RUNTIME),
    TransportRow(transport=_SEEN_THROUGH),
)
MEGATRON_ROWS = (
    # Megatron split sends over tensor-parallel ranks (scatter_gather_tensors_in_pipeline,
    # p2p_communication.py of 2021 to 2023).
    TransportRow(
        schedules=ONE_STAGE, years=_OLD_MEGATRON, transport=replace(_MEGATRON_BLOCKING, splits=True)
    ),
    TransportRow(schedules=ONE_STAGE, transport=_MEGATRON_BLOCKING),
    TransportRow(schedules=_ZERO_BUBBLE_SCHEDULES, overlapped=True, transport=_ZERO_BUBBLE),
    TransportRow(schedules=_ZERO_BUBBLE_SCHEDULES, transport=_SEEN_THROUGH),
    # --overlap-p2p-communication did not exist before 2023 and was off by default in 2023. Since
    # then it is on by default.
    TransportRow(years=_OLD_MEGATRON, transport=replace(_MEGATRON_TURNS, splits=True)),
    TransportRow(overlapped=True, transport=_MEGATRON_OVERLAPPED),
    TransportRow(transport=_MEGATRON_TURNS),
)
