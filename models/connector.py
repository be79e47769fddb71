"""Connects a vision tower's patches to the LLM's visual tokens."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.layers import LayerNorm, Linear, exact_gelu
from models.sizes import VisionSize

Array = jax.Array
MERGED_NORM_EPS = 1e-5


def merge_patches(x: Array, grid: int, merge: int) -> Array:
    """Merge [items, grid * grid, width] into [items, (grid / merge)^2, merge^2 * width].

    Each `merge` x `merge` square of patches becomes one token that concatenates their features in
    row order ("pixel unshuffle"); tokens stay in row order.
    """
    items, _, width = x.shape
    side = grid // merge
    x = x.reshape(items, side, merge, side, merge, width).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(items, side * side, merge * merge * width)


class Connector(nn.Module):
    """Optional final norm of the tower, merging of patches, two-layer MLP with GELU.

    In the internvit form the class token is dropped first, and the merged features are normed.
    """

    size: VisionSize
    out_width: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array) -> Array:
        s = self.size
        x = x[:, s.tokens_in_tower - s.patches_per_tile :]
        if s.post_norm:
            x = LayerNorm(s.norm_eps, name="post_norm")(x)
        x = merge_patches(x, s.grid, s.merge)
        if s.form == "internvit":
            x = LayerNorm(MERGED_NORM_EPS, name="merged_norm")(x)
        out_shape = (self.out_width,)
        fan_in = (x.shape[-1],)
        x = Linear(fan_in, out_shape, (None,), ("mlp",), self.dtype, bias=True, name="hidden")(x)
        x = exact_gelu(x)
        return Linear(
            out_shape, out_shape, ("mlp",), ("embed",), self.dtype, bias=True, name="out"
        )(x)
