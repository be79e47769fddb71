"""Reports of a compiled plan: programs, memory per device, and a remedy if it does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dflop_jax.hardware import GIB
from dflop_jax.records import FORWARD, REDUCE, UPDATE


@dataclass(frozen=True)
class ProgramReport:
    """Report of one compiled program; bytes and FLOPs are per device."""

    name: str  # unique description in its plan
    segment: str  # the program runs on its submesh
    submesh: str
    kind: str  # direction of its task, "exchange" or "sum"
    mesh: tuple[int, ...]  # sizes of the submesh's axes
    keeping: bool = False  # whether it uses the segment's second recompute policy
    same_as: str = ""  # equal program that was compiled earlier, in this plan or another
    compile_s: float = 0.0  # XLA's compile time; 0 if `same_as` is set
    argument_bytes: float = 0.0
    output_bytes: float = 0.0
    handed_bytes: float = 0.0  # the part of a forward task's outputs that are residuals
    aliased_bytes: float = 0.0
    temp_bytes: float = 0.0
    flops: float = 0.0
    needed_flops: float = 0.0  # see `profile.needed`; 0 for programs without layers
    executed_over_needed: float | None = None
    float32_dot_flops: float = 0.0
    collectives: Mapping[str, float] = field(default_factory=dict)  # bytes per run, by kind
    pair_arrays: tuple[str, ...] = ()  # of a task, see `hlo_text`
    unknown: tuple[str, ...] = ()  # loops of unknown length and kernels whose FLOPs are missing
    error: str = ""  # one line, why it could not be compiled; then all numbers are 0

    @property
    def work_bytes(self) -> float:
        """Bytes in addition to the arguments while the program runs."""
        return self.temp_bytes + self.output_bytes - self.aliased_bytes


@dataclass(frozen=True)
class SegmentMemory:
    """Memory of a segment on one device between programs."""

    segment: str
    submesh: str
    resource: int
    state_bytes: float  # parameters, gradients and optimizer state
    input_bytes: float  # inputs of one group in flight, in the largest shape
    in_flight: int  # maximum number of groups in flight
    shard_bytes: float  # reduced gradients, live from REDUCE to UPDATE
    remat: str
    zero: int = 1


@dataclass(frozen=True)
class CompiledMemory:
    """Peak bytes per device of a submesh."""

    submesh: str
    state_bytes: float  # of all segments on these devices
    in_flight_bytes: float  # inputs and residuals of the groups in flight
    work_bytes: float  # of `program`
    program: str  # the program with the most work bytes
    planned_bytes: float = 0.0  # the planner's predicted peak; 0: none

    @property
    def peak_bytes(self) -> float:
        return self.state_bytes + self.in_flight_bytes + self.work_bytes


@dataclass(frozen=True)
class CompileReport:
    """Report of a plan's programs, each compiled for all devices of its submesh, and whether they
    fit into `budget_bytes` per device."""

    chip: str
    n_devices: int
    n_nodes: int
    budget_bytes: float
    programs: tuple[ProgramReport, ...]
    memory: tuple[CompiledMemory, ...]
    fits: bool
    verdict: str

    @property
    def exit_code(self) -> int:
        """Exit code of the command."""
        return 0 if self.fits else 1


def device_memory(
    segments: Sequence[SegmentMemory],
    programs: Sequence[ProgramReport],
    planned_peaks: Mapping[str, float],
) -> tuple[CompiledMemory, ...]:
    """Return the peak bytes per device of each block of devices: state of its segments, inputs and
    residuals of groups in flight, and temporaries of the largest program. During reduction and
    update, all reduced gradients of the block are live, too. `planned_peaks`: by submesh."""
    resource = {s.segment: s.resource for s in segments}
    shards = Counter[int]()
    for s in segments:
        shards[s.resource] += s.shard_bytes  # type: ignore[assignment]

    def residual_bytes(s: SegmentMemory) -> float:
        """Return bytes of groups in flight in the largest shape, under the first policy."""
        handed = (p.handed_bytes for p in programs if p.segment == s.segment and not p.keeping)
        return (s.input_bytes + max(handed, default=0.0)) * s.in_flight

    def work_bytes(p: ProgramReport) -> float:
        """Return a program's bytes in addition to its segments' state and groups in flight."""
        shard_bytes = shards[resource[p.segment]]
        if p.kind == FORWARD:  # residuals count as groups in flight
            return p.work_bytes - p.handed_bytes
        if p.kind == REDUCE:  # the outputs are part of the shards
            return p.temp_bytes + shard_bytes
        return p.work_bytes + (shard_bytes if p.kind == UPDATE else 0.0)

    by_device = []
    for r in dict.fromkeys(resource.values()):
        on_resource = [s for s in segments if s.resource == r]
        largest = max((p for p in programs if resource[p.segment] == r), key=work_bytes)
        names = dict.fromkeys(s.submesh for s in on_resource)
        by_device.append(
            CompiledMemory(
                submesh=", ".join(names),
                state_bytes=sum(s.state_bytes for s in on_resource),
                in_flight_bytes=sum(map(residual_bytes, on_resource)),
                work_bytes=work_bytes(largest),
                program=largest.name,
                planned_bytes=max(planned_peaks.get(name, 0.0) for name in names),
            )
        )
    return tuple(by_device)


def describe_fit(
    chip: str,
    budget_bytes: float,
    memory: Sequence[CompiledMemory],
    programs: Sequence[ProgramReport],
    segments: Sequence[SegmentMemory],
) -> tuple[bool, str]:
    """Return (whether every program compiles and the plan fits, one line with the reason)."""
    if failed := [p for p in programs if p.error]:
        name = failed[0].name + f" (and {len(failed) - 1} more)" * (len(failed) > 1)
        return False, f"{name} cannot be compiled for {chip}: {failed[0].error}"
    worst = max(memory, key=lambda m: m.peak_bytes)
    spare_bytes = budget_bytes - worst.peak_bytes
    breakdown = (
        f"{worst.state_bytes / GIB:.1f} state, {worst.in_flight_bytes / GIB:.1f} of groups in "
        f"flight, {worst.work_bytes / GIB:.1f} {worst.program}"
    )
    if worst.planned_bytes:
        breakdown += f"; planned {worst.planned_bytes / GIB:.1f}"
    peak = f"{worst.peak_bytes / GIB:.1f} of {budget_bytes / GIB:.1f} GiB on {worst.submesh}"
    peak += f" ({breakdown})"
    if spare_bytes >= 0:
        return True, f"fits {chip}: at most {peak}, {spare_bytes / GIB:.1f} GiB to spare"
    return False, (
        f"does not fit {chip}: {peak}, {-spare_bytes / GIB:.1f} GiB too much; "
        f"{_suggest_remedy(worst, segments)}"
    )


def _suggest_remedy(worst: CompiledMemory, segments: Sequence[SegmentMemory]) -> str:
    """Describe how to reduce the largest part of the peak."""
    segments_there = [s for s in segments if s.submesh in worst.submesh.split(", ")]
    if worst.state_bytes > worst.work_bytes + worst.in_flight_bytes:
        more_sharding = "plan.zero 3, " * any(s.zero < 3 for s in segments_there)
        return (
            f"{more_sharding}a larger tensor degree (plan.max_model), more devices, or training "
            "fewer parameters (train.stage, train.freeze, train.lora_rank) would help"
        )
    rows = "smaller rows (data.max_tokens, plan.max_microbatches) or a larger tensor degree"
    if any(s.remat in ("none", "dots", "named") for s in segments_there):
        return f"train.remat layers, {rows} (plan.max_model) would help"
    return f"{rows} (plan.max_model) would help"
