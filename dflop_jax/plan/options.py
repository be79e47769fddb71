"""How modules save memory: what backward computes again, and what data ranks share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dflop_jax.records import Layout, Plan, Remat, SegmentPlan, Zero


@dataclass(frozen=True)
class Option:
    """How a module saves memory; see `SegmentPlan`. The default saves nothing that costs time."""

    remat: Remat = "none"
    zero: Zero = 1
    shard_devices: int = 0

    def of(self, segment: SegmentPlan) -> SegmentPlan:
        """The segment with this option, and no second recompute policy."""
        return replace(
            segment,
            remat=self.remat,
            zero=self.zero,
            shard_devices=self.shard_devices,
            remat_less=None,
        )

    @staticmethod
    def held_by(segment: SegmentPlan) -> Option:
        """The segment's option."""
        return Option(segment.remat, segment.zero, segment.shard_devices)

    @property
    def words(self) -> str:
        """What differs from the default; "" if nothing does."""
        parts = [self.remat] * (self.remat != "none") + [f"ZeRO {self.zero}"] * (self.zero > 1)
        parts += [f"within {self.shard_devices}"] * (self.shard_devices > 0)
        return " ".join(parts)


def options_of(layout: Layout) -> dict[str, Option]:
    """The option of every module, which all its segments share; without blocks of devices where
    these change nothing."""
    options = {}
    for m in layout.modules:
        segment = layout.segments_of(m)[0]
        mesh = layout.submesh(segment.submesh)
        none = segment.shard_ranks(mesh.data, mesh.model) == mesh.data
        options[m] = Option.held_by(replace(segment, shard_devices=0) if none else segment)
    return options


def with_options(plan: Plan, options: Mapping[str, Option]) -> Plan:
    """The plan with other options of some modules."""
    segments = tuple(options.get(s.module, Option.held_by(s)).of(s) for s in plan.layout.segments)
    return plan.with_layout(segments=segments)


def saving_words(layout: Layout) -> str:
    """How the plan's modules save memory; "none" if they do not. A module with a second recompute
    policy is "named or none"."""
    words = []
    for m, option in options_of(layout).items():
        less = next((s.remat_less for s in layout.segments_of(m) if s.remat_less), None)
        both_policies = option.words.replace(option.remat, f"{option.remat} or {less}", 1)
        words += [f"{m} {both_policies if less else option.words}"] * bool(option.words)
    return ", ".join(words) or "none"
