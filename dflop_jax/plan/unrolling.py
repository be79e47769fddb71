"""Chooses whether the layers of a module's stages are unrolled, by what the run's length pays back.

A loop over layers compiles in the time of one layer, but copies residuals in every step
(`profile.loops`); unrolled layers take time to compile once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from dflop_jax.profile.loops import loop_copies_s
from dflop_jax.records import ModelProfile, Remat

# Seconds in which a layer compiles for a bucket, forward and backward: 0.7 in SigLIP-400M and in
# Qwen2-0.5B on two free cores (docs/gpus.md); machines with GPUs have more.
_COMPILE_LAYER_S = 0.7


def choose_unrolled(
    profile: ModelProfile, step_tokens: Mapping[str, float], steps: int, n_buckets: int
) -> dict[tuple[str, Remat], bool]:
    """Return, by module and recompute policy, whether unrolling a layer saves more seconds in all
    `steps` than it takes to compile for `n_buckets`. `step_tokens`: tokens per device and step."""
    return {
        (m, remat): steps * loop_copies_s(profile.hardware, n * _token_bytes(profile, m, remat))
        > _COMPILE_LAYER_S * n_buckets
        for m, n in step_tokens.items()
        for remat in get_args(Remat)
    }


def _token_bytes(profile: ModelProfile, module: str, remat: Remat) -> float:
    """Return the bytes of a token's residuals in one layer of a module, on all tensor ranks
    together, by the timing of the largest shape; 0 if the policy has no price."""
    policy = "none" if remat == "segment" else remat
    timings = [t for t in profile.timings if t.module == module and policy in t.recompute]
    largest = max(timings, key=lambda t: (-t.model, t.shape.size), default=None)
    if largest is None:
        return 0.0
    return largest.model * largest.recompute[policy].layer_bytes / largest.shape.size
