"""Settings of a plan search, and defaults for the limits of its space derived from the job.

Higher limits take longer to plan, and for tensor parallelism to profile, so small jobs get low
limits. They follow from the model, the memory per device, the devices per node and the data, unless
`plan.max_model`, `plan.max_stage` or `plan.max_microbatches` is set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dflop_jax.config import PlanConfig
from dflop_jax.records import Load, ModelProfile, Remat, SegmentPlan, SubmeshPlan, Zero
from dflop_jax.schedule.batch import LARGE_BATCH

# Numbers of groups per mean batch; each is priced for every layout.
GROUPS_PER_BATCH = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
# Limits for a model that fits on one device.
DEFAULT_LIMITS = {"max_model": 2, "max_stage": 4, "max_microbatches": 16}
# Share of device memory for the layers' inputs of all microbatches in flight; parameters and
# optimizer state take about 1/2, a program's temporaries another 1/4. Half the share would double
# the maximum number of microbatches.
INPUTS_SHARE = 0.25


@dataclass(frozen=True)
class SearchSpec:
    """Devices, batch size and settings of a search."""

    n_devices: int
    global_batch: int
    config: PlanConfig = field(default_factory=PlanConfig)
    memory_bytes: float = 0.0  # per device; 0: no limit
    # "auto" (each module's fastest value that fits into memory), or the value of every segment.
    remat: Remat | Literal["auto"] = "auto"
    zero: Zero | Literal["auto"] = "auto"
    steps: int = 0  # of the run; more steps make up for longer compilation
    token_multiple: int = 32  # token capacities are multiples of it; 128 on GPU
    trains: Callable[[SegmentPlan], bool] = lambda _: True  # has a segment trainable parameters?
    allowed: Callable[[SubmeshPlan], bool] = lambda _: True  # can the devices form a submesh?
    n_shown: int = 3  # minimum number of placements in `SearchResult.candidates`
    refine: bool = True  # fit the buckets to the data; False: the ranked plan's one bucket
    max_alternatives: int = 0  # plans of other policies in `SearchResult.alternatives`

    def __post_init__(self) -> None:
        if self.n_devices < 1 or self.global_batch < 1:
            raise ValueError(
                f"the plan has {self.n_devices} devices and {self.global_batch} samples per step; "
                "give at least one of each"
            )

    @property
    def limits(self) -> dict[str, int]:
        """Limits of the space, from the config or derived from the job (`with_limits`)."""
        return {name: getattr(self.config, name) for name in DEFAULT_LIMITS}

    @property
    def n_batches(self) -> int:
        """Number of sampled global batches."""
        scale = min(1.0, LARGE_BATCH / self.global_batch)
        return max(1, round(self.config.sampled_batches * scale))


def largest_module_bytes(
    float32_bytes: Mapping[str, float], bfloat16_modules: Collection[str]
) -> float:
    """Return the parameter and gradient bytes of the largest module, which ZeRO 1 does not shard.
    Parameters are bfloat16 in `bfloat16_modules`, else float32; gradients are float32."""
    return max(n * (1.5 if m in bfloat16_modules else 2.0) for m, n in float32_bytes.items())


def parallel_limits(module_bytes: float, memory_bytes: float, node: int) -> tuple[int, int]:
    """Return (max_model, max_stage) for a module of `module_bytes` on devices of `memory_bytes` (0:
    unknown, no split needed). The module is split over a power of two of devices: by tensor
    parallelism within a `node`, or by a pipeline of at most a node's devices; larger modules
    combine both."""
    n_devices = _power_of_two(module_bytes / memory_bytes) if memory_bytes else 1
    in_node = min(n_devices, node)
    max_model = max(DEFAULT_LIMITS["max_model"], in_node)
    return max_model, max(DEFAULT_LIMITS["max_stage"], in_node, -(-n_devices // max_model))


def with_limits(spec: SearchSpec, profile: ModelProfile, loads: Sequence[Load]) -> SearchSpec:
    """Return the spec with limits of 0 derived from the job, the profile's node size, and effort
    "full" for "auto", which has no run to be in proportion to."""
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
    if memory_bytes:  # the inputs of one group per stage must fit into their share of memory
        bytes_per_device = spec.global_batch * sample_bytes / spec.n_devices
        needed = _power_of_two(stage * bytes_per_device / (INPUTS_SHARE * memory_bytes))
        microbatches = max(min_microbatches, min(needed, GROUPS_PER_BATCH[-1]))
    microbatches = config.max_microbatches or microbatches
    config = replace(config, max_model=model, max_stage=stage, max_microbatches=microbatches)
    effort = "full" if config.effort == "auto" else config.effort
    return replace(spec, config=replace(config, node=node, effort=effort))


def _power_of_two(minimum: float) -> int:
    """Return the smallest power of two that is at least `minimum`."""
    return 1 << max(0, math.ceil(minimum) - 1).bit_length()
