"""How modules save memory: what backward computes again, and what data ranks share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dflop_jax.records import Layout, Plan, Remat, SegmentPlan, Zero


@dataclass(frozen=True)
class MemoryOption:
    """How a module saves memory; see `SegmentPlan`. The default saves nothing that costs time."""

    remat: Remat = "none"
    zero: Zero = 1
    shard_devices: int = 0

    def apply(self, segment: SegmentPlan) -> SegmentPlan:
        """The segment with this option, and no second recompute policy."""
        return replace(
            segment,
            remat=self.remat,
            zero=self.zero,
            shard_devices=self.shard_devices,
            remat_less=None,
        )

    @staticmethod
    def from_segment(segment: SegmentPlan) -> MemoryOption:
        """The segment's option."""
        return MemoryOption(segment.remat, segment.zero, segment.shard_devices)

    @property
    def description(self) -> str:
        """What differs from the default; "" if nothing does."""
        words = [self.remat] * (self.remat != "none") + [f"ZeRO {self.zero}"] * (self.zero > 1)
        words += [f"within {self.shard_devices}"] * (self.shard_devices > 0)
        return " ".join(words)


def options_of(layout: Layout) -> dict[str, MemoryOption]:
    """The option of every module, which all its segments share; without blocks of devices where
    these change nothing."""
    options = {}
    for m in layout.modules:
        segment = layout.segments_of(m)[0]
        mesh = layout.submesh(segment.submesh)
        if segment.shard_ranks(mesh.data, mesh.model) == mesh.data:
            segment = replace(segment, shard_devices=0)
        options[m] = MemoryOption.from_segment(segment)
    return options


def with_options(plan: Plan, options: Mapping[str, MemoryOption]) -> Plan:
    """The plan with other options of some modules."""
    own = MemoryOption.from_segment
    segments = (options.get(s.module, own(s)).apply(s) for s in plan.layout.segments)
    return plan.with_layout(segments=tuple(segments))


def describe_savings(layout: Layout) -> str:
    """How modules save memory, in words; "none" if they do not. A module with a second recompute
    policy is "named or none"."""
    words = []
    for m, option in options_of(layout).items():
        text = option.description
        if second := next((s.remat_less for s in layout.segments_of(m) if s.remat_less), None):
            text = text.replace(option.remat, f"{option.remat} or {second}", 1)
        words += [f"{m} {text}"] * bool(text)
    return ", ".join(words) or "none"
