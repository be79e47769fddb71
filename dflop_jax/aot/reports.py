"""Reports of a compiled plan: its programs, the memory of its devices, and a remedy if it does not
fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from dflop_jax.hardware import GIB
from dflop_jax.records import FORWARD, REDUCE, UPDATE


@dataclass(frozen=True)
class ProgramReport:
    """One compiled program, per device.

    Attributes:
      name: in words, unique in its plan.
      segment: on whose submesh it runs; `kind` its task, "exchange" or "sum".
      mesh: sizes of its submesh's axes.
      keeping: whether it is of its segment's second recompute policy.
      same_as: program of equal text that was compiled before it, in this plan or another.
      compile_s: seconds of XLA; 0 where `same_as` is given.
      handed_bytes: of its outputs, what a forward task leaves for its backward task.
      needed_flops: see `profile.needed`; 0 of programs that compute no layer, whose ratio is None.
      collectives: bytes in one run, by kind.
      pair_arrays: of a task, see `hlo_text`.
      unknown: loops of unknown length and kernels whose FLOPs nobody knows, which are missing.
      error: why it could not be compiled, in a line; the figures are then 0.
    """

    name: str
    segment: str
    submesh: str
    kind: str
    mesh: tuple[int, ...]
    keeping: bool = False
    same_as: str = ""
    compile_s: float = 0.0
    argument_bytes: float = 0.0
    output_bytes: float = 0.0
    handed_bytes: float = 0.0
    aliased_bytes: float = 0.0
    temp_bytes: float = 0.0
    flops: float = 0.0
    needed_flops: float = 0.0
    executed_over_needed: float | None = None
    float32_dot_flops: float = 0.0
    collectives: Mapping[str, float] = field(default_factory=dict)
    pair_arrays: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    error: str = ""

    @property
    def work_bytes(self) -> float:
        """Bytes beside the program's arguments while it runs."""
        return self.temp_bytes + self.output_bytes - self.aliased_bytes


@dataclass(frozen=True)
class SegmentMemory:
    """What a segment holds on one device between programs.

    Attributes:
      state_bytes: parameters, gradients and optimizer state.
      input_bytes: the input of one group in flight, of the largest shape.
      in_flight: groups whose inputs are held at once.
      shard_bytes: reduced gradients, from REDUCE to UPDATE.
      remat, zero: its recompute policy and ZeRO degree.
    """

    segment: str
    submesh: str
    resource: int
    state_bytes: float
    input_bytes: float
    in_flight: int
    shard_bytes: float
    remat: str
    zero: int = 1


@dataclass(frozen=True)
class CompiledMemory:
    """Most bytes that a device of a submesh holds.

    Attributes:
      state_bytes: of all segments on these devices.
      kept_bytes: inputs of the groups in flight, and what their forward handed to backward.
      program: the one that takes most beside them, `work_bytes`.
      planned_bytes: what the planner expected of the peak; 0 where it does not say.
    """

    submesh: str
    state_bytes: float
    kept_bytes: float
    work_bytes: float
    program: str
    planned_bytes: float = 0.0

    @property
    def peak_bytes(self) -> float:
        return self.state_bytes + self.kept_bytes + self.work_bytes


@dataclass(frozen=True)
class CompileReport:
    """A plan's programs compiled for a chip, and whether they fit into its memory.

    `budget_bytes` is what a device may use; the topology has `n_nodes` nodes, and every program is
    compiled for all devices of its submesh, as each process of a run compiles it.
    """

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
        """The command's exit code: 1 if a program does not compile or fit."""
        return 0 if self.fits else 1


def device_memory(
    segments: Sequence[SegmentMemory],
    programs: Sequence[ProgramReport],
    planned_peaks: Mapping[str, float] = MappingProxyType({}),
) -> tuple[CompiledMemory, ...]:
    """Peak bytes of each block of devices: state of its segments, inputs and residuals of the
    groups in flight, and temporaries of the largest program. During reduction and update all
    reduced gradients of the block are in memory too.

    Args:
      planned_peaks: the plan's own peaks by submesh.
    """
    resource = {s.segment: s.resource for s in segments}
    shards: dict[int, float] = {}
    for s in segments:
        shards[s.resource] = shards.get(s.resource, 0.0) + s.shard_bytes

    def residual_bytes(s: SegmentMemory) -> float:
        """Of the groups in flight, of the largest shape, under the segment's own policy."""
        handed = (p.handed_bytes for p in programs if p.segment == s.segment and not p.keeping)
        return (s.input_bytes + max(handed, default=0.0)) * s.in_flight

    def work_bytes(p: ProgramReport) -> float:
        """Beside what segments hold while a program runs."""
        shard_bytes = shards[resource[p.segment]]
        if p.kind == FORWARD:  # what backward is given counts as kept
            return p.work_bytes - p.handed_bytes
        if p.kind == REDUCE:  # its outputs are its part of the shards
            return p.temp_bytes + shard_bytes
        return p.work_bytes + (shard_bytes if p.kind == UPDATE else 0.0)

    by_device = []
    for r in dict.fromkeys(resource.values()):
        on_resource = [s for s in segments if s.resource == r]
        resource_programs = [p for p in programs if resource[p.segment] == r]
        largest = max(resource_programs, key=work_bytes, default=None)
        names = dict.fromkeys(s.submesh for s in on_resource)
        by_device.append(
            CompiledMemory(
                submesh=", ".join(names),
                state_bytes=sum(s.state_bytes for s in on_resource),
                kept_bytes=sum(map(residual_bytes, on_resource)),
                work_bytes=work_bytes(largest) if largest else 0.0,
                program=largest.name if largest else "",
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
    """(whether every program compiles and the plan fits, a line that says so or names what
    fails)."""
    failed = [p for p in programs if p.error]
    if failed:
        more_errors = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return (
            False,
            f"{failed[0].name}{more_errors} cannot be compiled for {chip}: {failed[0].error}",
        )
    worst = max(memory, key=lambda m: m.peak_bytes)
    spare_bytes = budget_bytes - worst.peak_bytes
    breakdown = (
        f"{worst.state_bytes / GIB:.1f} state, {worst.kept_bytes / GIB:.1f} of groups in flight, "
        f"{worst.work_bytes / GIB:.1f} {worst.program}"
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
    """What would lower the largest part of the peak."""
    segments_there = [s for s in segments if s.submesh in worst.submesh.split(", ")]
    if worst.state_bytes > worst.work_bytes + worst.kept_bytes:
        more_sharding = "plan.zero 3, " * any(s.zero < 3 for s in segments_there)
        return (
            f"{more_sharding}a larger tensor degree (plan.max_model), more devices, or training "
            "fewer parameters (train.stage, train.freeze, train.lora_rank) would help"
        )
    rows = "smaller rows (data.max_tokens, plan.max_microbatches) or a larger tensor degree"
    if any(s.remat in ("none", "dots", "named") for s in segments_there):
        return f"train.remat layers, {rows} (plan.max_model) would help"
    return f"{rows} (plan.max_model) would help"
