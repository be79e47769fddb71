"""What a plan is searched for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from dflop_jax.config import PlanConfig
from dflop_jax.records import ModelProfile, Remat, SegmentPlan, SubmeshPlan, Zero
from dflop_jax.schedule.sample import LARGE_BATCH

_RANKED = 3  # placements at least, of which a plan is chosen


def _always(_: object) -> bool:
    return True


@dataclass(frozen=True)
class SearchSpec:
    """What a plan is searched for.

    Attributes:
      memory_bytes: memory of a device; 0: not checked.
      remat, zero: "auto" (the cheapest for each module that memory holds), or the value of every
        segment.
      token_multiple: token capacities are multiples of it (128 on GPU).
      trains: whether a segment has trainable parameters.
      allowed: whether the devices at hand can form a submesh.
      shown: placements that are ranked exactly, for `SearchResult.candidates`.
      refine: whether buckets are chosen for the plan; else it has the one that it was ranked with.
    """

    n_devices: int
    global_batch: int
    config: PlanConfig = field(default_factory=PlanConfig)
    memory_bytes: float = 0.0
    remat: Remat | Literal["auto"] = "auto"
    zero: Zero | Literal["auto"] = "auto"
    token_multiple: int = 32
    trains: Callable[[SegmentPlan], bool] = _always
    allowed: Callable[[SubmeshPlan], bool] = _always
    shown: int = _RANKED
    refine: bool = True

    def __post_init__(self) -> None:
        if self.n_devices < 1 or self.global_batch < 1:
            raise ValueError(
                f"a plan for {self.n_devices} devices and {self.global_batch} samples a step: "
                "give at least one of each"
            )

    def known_node(self, profile: ModelProfile) -> int:
        """Devices of a node; 0: nobody says."""
        return self.config.node or profile.devices_per_node

    @property
    def n_batches(self) -> int:
        """Global batches that are sampled."""
        share = min(1.0, LARGE_BATCH / self.global_batch)
        return max(1, round(self.config.sampled_batches * share))

    @property
    def n_ranked(self) -> int:
        """Placements that are ranked exactly."""
        return max(self.shown, _RANKED) if self.refine else self.shown
