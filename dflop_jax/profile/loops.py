"""The time in which loops over layers copy residuals on GPUs."""

from __future__ import annotations

from dflop_jax.profile.state import Array
from dflop_jax.records import Hardware, SegmentPlan
from dflop_jax.runtime.segment import max_unrolled_layers

# Seconds of the copies relative to those of the residuals' bytes at the memory's full bandwidth: a
# read, a write and the zeros of the stack, and other copies that unrolling saves. Of programs
# compiled for an H100 as loops and unrolled (SigLIP-400M, Qwen2-0.5B; policies none and dots) it
# was 3.8 to 4.2.
_COPIES = 4.0


def copies_residuals(hardware: Hardware | None, segment: SegmentPlan, stages: int) -> bool:
    """Return whether a loop over the layers of a stage copies residuals, which takes time on GPUs:
    of each layer into stacks, and out of them."""
    max_unrolled = max_unrolled_layers(hardware.chip) if hardware else 0
    return max_unrolled > 0 and not segment.unrolls_layers(stages, max_unrolled)


def loop_copies_s(hardware: Hardware | None, residual_bytes: Array) -> Array:
    """Return the seconds in which a loop copies residuals; 0 on CPU."""
    if hardware is None or not max_unrolled_layers(hardware.chip):
        return 0.0
    return _COPIES * residual_bytes / hardware.memory_bandwidth
