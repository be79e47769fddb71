"""What a plan is searched for, and how far the space of plans reaches where the settings do not
say: by what the job needs.

A limit costs seconds of planning, and one of tensor parallelism seconds of profiling, so small jobs
have small ones. What is needed follows from the model, the memory of a device, the size of a node
and the data; `plan.max_model`, `plan.max_stage` and `plan.max_microbatches` above 0 go first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dflop_jax.config import PlanConfig
from dflop_jax.records import Load, ModelProfile, Remat, SegmentPlan, SubmeshPlan, Zero
from dflop_jax.schedule.batch import LARGE_BATCH

# Groups into which a mean batch may go; every one is priced for every layout.
GROUPS_PER_BATCH = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
# Upper limits for a model that fits on one device.
DEFAULT_LIMITS = {"max_model": 2, "max_stage": 4, "max_microbatches": 16}
# Share of a device's memory for the layers' inputs of all microbatches in flight: parameters and
# optimizer state fill about a half, temporaries of a program another quarter. Half of it would
# double the maximum number of microbatches.
INPUTS_SHARE = 0.25


@dataclass(frozen=True)
class SearchSpec:
    """Devices, batch and settings of a search."""

    n_devices: int
    global_batch: int
    config: PlanConfig = field(default_factory=PlanConfig)
    memory_bytes: float = 0.0  # of a device; 0: no limit
    # "auto" (the cheapest for each module that memory holds), or the value of every segment.
    remat: Remat | Literal["auto"] = "auto"
    zero: Zero | Literal["auto"] = "auto"
    token_multiple: int = 32  # of token capacities; 128 on GPU
    trains: Callable[[SegmentPlan], bool] = lambda _: True  # has it trainable parameters?
    allowed: Callable[[SubmeshPlan], bool] = lambda _: True  # can the devices at hand form it?
    n_shown: int = 3  # placements that are ranked exactly, for `SearchResult.candidates`
    # Whether the plan gets chosen buckets; else it has the one by which it was ranked.
    refine: bool = True

    def __post_init__(self) -> None:
        if self.n_devices < 1 or self.global_batch < 1:
            raise ValueError(
                f"a plan for {self.n_devices} devices and {self.global_batch} samples a step: "
                "give at least one of each"
            )

    @property
    def limits(self) -> dict[str, int]:
        """Limits of the space, as configured or as the job needs (`with_limits`)."""
        return {name: getattr(self.config, name) for name in DEFAULT_LIMITS}

    @property
    def n_batches(self) -> int:
        """Number of sampled global batches."""
        scale = min(1.0, LARGE_BATCH / self.global_batch)
        return max(1, round(self.config.sampled_batches * scale))


def largest_module_bytes(
    float32_bytes: Mapping[str, float], bfloat16_modules: Collection[str]
) -> float:
    """Bytes of parameters and gradients of the largest module, which a data rank holds whole under
    ZeRO 1: parameters in bfloat16 for `bfloat16_modules`, else in float32, as gradients are."""
    return max(n * (1.5 if m in bfloat16_modules else 2.0) for m, n in float32_bytes.items())


def parallel_limits(module_bytes: float, memory_bytes: float, node: int) -> tuple[int, int]:
    """(max_model, max_stage) for a module of so many bytes and devices of `memory_bytes` (0: not
    known, nothing is shared). A power of two of devices shares them, by tensor parallelism alone
    where a `node` has as many, and by a pipeline alone of at most a node's devices or of what the
    largest tensor parallelism leaves."""
    n_devices = _power_of_two(module_bytes / memory_bytes) if memory_bytes else 1
    in_node = min(n_devices, node)
    max_model = max(DEFAULT_LIMITS["max_model"], in_node)
    return max_model, max(DEFAULT_LIMITS["max_stage"], in_node, -(-n_devices // max_model))


def with_limits(spec: SearchSpec, profile: ModelProfile, loads: Sequence[Load]) -> SearchSpec:
    """The spec with the job's limits where settings have 0, and the profile's node size."""
    config, memory_bytes = spec.config, spec.memory_bytes
    float32_bytes = {m: 4.0 * profile.n_elements(m) for m in profile.n_layers}
    bfloat16 = [m for m in profile.n_layers if profile.has_bfloat16_params(m)]
    module_bytes = largest_module_bytes(float32_bytes, bfloat16)
    node = config.node or profile.devices_per_node
    model, stage = parallel_limits(module_bytes, memory_bytes, node or spec.n_devices)
    model, stage = config.max_model or model, config.max_stage or stage
    per_token = {t.module: t.hidden_bytes / t.shape.size for t in profile.timings if t.model == 1}
    sample_bytes = sum(
        per_token.get(m, 0.0) * n * sum(load.tokens(m) for load in loads) / len(loads)
        for m, n in profile.n_layers.items()
    )
    microbatches = min_microbatches = DEFAULT_LIMITS["max_microbatches"]
    if memory_bytes:  # that inputs of as many groups as a pipeline has stages fill a share of
        bytes_per_device = spec.global_batch * sample_bytes / spec.n_devices
        needed = _power_of_two(stage * bytes_per_device / (INPUTS_SHARE * memory_bytes))
        microbatches = max(min_microbatches, min(needed, GROUPS_PER_BATCH[-1]))
    microbatches = config.max_microbatches or microbatches
    config = replace(config, max_model=model, max_stage=stage, max_microbatches=microbatches)
    return replace(spec, config=replace(config, node=node))


def _power_of_two(minimum: float) -> int:
    """The smallest power of two that is at least `minimum`."""
    return 1 << max(0, math.ceil(minimum) - 1).bit_length()
