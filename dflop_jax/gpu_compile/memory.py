"""Whether compiled programs fit into a device, and what would help where they do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from dflop_jax.gpu_compile.reports import DeviceMemory, ProgramReport, SegmentState
from dflop_jax.hardware import GIB
from dflop_jax.records import FORWARD, REDUCE, UPDATE
from dflop_jax.sim.memory import Need, peaks_of


def device_memory(
    states: Sequence[SegmentState],
    programs: Sequence[ProgramReport],
    planned: Mapping[str, float] = MappingProxyType({}),
) -> tuple[DeviceMemory, ...]:
    """Peak of each block of devices: what its segments hold, the inputs of the groups in flight and
    what their forward gave, and the one program that takes most beside them. While segments are
    reduced and updated, all reduced gradients on the block are there too. `planned` are the plan's
    own peaks by submesh."""
    resource = {s.segment: s.resource for s in states}
    shards: dict[int, float] = {}
    for s in states:
        shards[s.resource] = shards.get(s.resource, 0.0) + s.shard_bytes

    handed = {s.segment: _handed_bytes(s.segment, programs) for s in states}
    kept_bytes = {s.segment: s.input_bytes + handed[s.segment] for s in states}

    def work(p: ProgramReport) -> float:
        if p.kind == FORWARD:  # what backward is given counts as kept
            return p.work_bytes - p.handed_bytes
        return _work_bytes(p, shards[resource[p.segment]])

    def need(s: SegmentState) -> Need:
        work_bytes = max((work(p) for p in programs if p.segment == s.segment), default=0.0)
        return s.resource, s.state_bytes + kept_bytes[s.segment] * s.in_flight, work_bytes

    peaks = peaks_of(map(need, states))
    by_device = []
    for r, peak in peaks.items():
        here = [s for s in states if s.resource == r]
        in_flight = sum(kept_bytes[s.segment] * s.in_flight for s in here)
        state = sum(s.state_bytes for s in here)
        on_it = [p for p in programs if resource[p.segment] == r]
        largest = max(on_it, key=work, default=None)
        names = dict.fromkeys(s.submesh for s in here)
        by_device.append(
            DeviceMemory(
                submesh=", ".join(names),
                state_bytes=state,
                kept_bytes=in_flight,
                work_bytes=float(peak) - state - in_flight,
                program=largest.name if largest else "",
                planned_bytes=max(planned.get(name, 0.0) for name in names),
            )
        )
    return tuple(by_device)


def _handed_bytes(segment: str, programs: Sequence[ProgramReport]) -> float:
    """What a forward task leaves for its backward task, of the largest shape, under the segment's
    own recompute policy."""
    handed = (p.handed_bytes for p in programs if p.segment == segment and not p.keeping)
    return max(handed, default=0.0)


def _work_bytes(program: ProgramReport, shard_bytes: float) -> float:
    """Bytes beside the state while a program runs; `shard_bytes` are all reduced gradients."""
    if program.kind == REDUCE:  # its outputs are its part of the shards
        return program.temp_bytes + shard_bytes
    return program.work_bytes + (shard_bytes if program.kind == UPDATE else 0.0)


def verdict(
    chip: str,
    budget_bytes: float,
    memory: Sequence[DeviceMemory],
    programs: Sequence[ProgramReport],
    states: Sequence[SegmentState],
) -> tuple[bool, str]:
    """Whether everything compiles and fits, and a line that says so, or what does not."""
    failed = [p for p in programs if p.error]
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return False, f"{failed[0].name}{more} cannot be compiled for {chip}: {failed[0].error}"
    worst = max(memory, key=lambda m: m.peak_bytes)
    spare = budget_bytes - worst.peak_bytes
    parts = (
        f"{worst.state_bytes / GIB:.1f} state, {worst.kept_bytes / GIB:.1f} of groups in flight, "
        f"{worst.work_bytes / GIB:.1f} {worst.program}"
    )
    if worst.planned_bytes:
        parts += f"; planned {worst.planned_bytes / GIB:.1f}"
    of = (
        f"{worst.peak_bytes / GIB:.1f} of {budget_bytes / GIB:.1f} GiB on {worst.submesh} ({parts})"
    )
    if spare >= 0:
        return True, f"fits {chip}: at most {of}, {spare / GIB:.1f} GiB to spare"
    return False, (
        f"does not fit {chip}: {of}, {-spare / GIB:.1f} GiB too much; {_help(worst, states)}"
    )


def _help(worst: DeviceMemory, states: Sequence[SegmentState]) -> str:
    """What would make the most of a peak smaller."""
    here = [s for s in states if s.submesh in worst.submesh.split(", ")]
    if worst.state_bytes > worst.work_bytes + worst.kept_bytes:
        shared = "plan.zero 3, " * any(s.zero < 3 for s in here)
        return (
            f"{shared}a larger tensor degree (plan.max_model), more devices, or training fewer "
            "parameters (train.stage, train.freeze, train.lora_rank) would help"
        )
    rows = "smaller rows (data.max_tokens, plan.max_microbatches) or a larger tensor degree"
    if any(s.remat in ("none", "dots", "named") for s in here):
        return f"train.remat layers, {rows} (plan.max_model) would help"
    return f"{rows} (plan.max_model) would help"
