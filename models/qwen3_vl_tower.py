"""Vision tower at native resolution (Qwen3-VL): pictures and pairs of frames of any size, packed
into rows; `models.qwen3_vl` defines the order of patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.encoder import EncoderForm
from models.layers import LayerNorm, Linear, apply, exact_gelu, named_init, normal, tanh_gelu
from models.linen_module import Batch
from models.packed_encoder import PackedEncoder
from models.qwen3_vl_sizes import NativeVisionSize
from models.rotary import grid_angles

Array = jax.Array


def grid_weights(grid: Array, side: int) -> Array:
    """Return weights that resample a square of learnt positions, bilinearly and corner to corner.

    Args:
      grid: int [items, tokens, 4]: row, column, and the picture's numbers of rows and columns.
      side: positions along a side of the square.

    Returns:
      float32 [items, tokens, side * side], the weight of each position for a patch.
    """

    def along(index: Array, size: Array) -> Array:
        steps = jnp.maximum(size - 1, 1).astype(jnp.float32)
        scaled_index = index.astype(jnp.float32) * float(side - 1) / steps
        distance = jnp.abs(
            scaled_index[..., None] - jnp.arange(side, dtype=jnp.float32)[None, None]
        )
        return jnp.maximum(1.0 - distance, 0.0)

    rows, columns = (along(grid[..., i], grid[..., i + 2]) for i in range(2))
    weights = rows[..., :, None] * columns[..., None, :]
    return weights.reshape(*grid.shape[:2], side * side)


class NativeVisionEntry(nn.Module):
    """Embeds uint8 patches and adds learnt positions, resampled to each picture's grid."""

    size: NativeVisionSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, patches: Array, grid: Array) -> Array:
        s = self.size
        x = s.processing.normalize(patches, innermost=False).astype(self.dtype)
        fan_in, width = (s.patch_values,), (s.width,)
        x = Linear(fan_in, width, (None,), ("embed",), self.dtype, bias=True, name="patch")(x)
        init = named_init(normal(s.width**-0.5), None, "embed")
        table = self.param("position", init, (s.side**2, s.width), jnp.float32)
        # A product: its gradient adds up in a fixed order.
        weights = grid_weights(grid, s.side).astype(self.dtype)
        return x + jnp.tensordot(weights, table.astype(self.dtype), axes=1)


class Merger(nn.Module):
    """LayerNorm per patch, or per concatenated block if `joined`; merging; two-layer GELU MLP."""

    size: NativeVisionSize
    out_width: int
    dtype: jnp.dtype
    joined: bool

    @nn.compact
    def __call__(self, x: Array) -> Array:
        items, tokens, width = x.shape
        block = self.size.block
        norm = LayerNorm(self.size.norm_eps, name="norm")
        x = x if self.joined else norm(x)
        x = x[:, : tokens - tokens % block].reshape(items, tokens // block, block * width)
        x = norm(x) if self.joined else x
        inner, out_shape = (block * width,), (self.out_width,)
        x = Linear(inner, inner, (None,), ("mlp",), self.dtype, bias=True, name="hidden")(x)
        x = exact_gelu(x)
        return Linear(inner, out_shape, ("mlp",), ("embed",), self.dtype, bias=True, name="out")(x)


@dataclass(frozen=True)
class NativeVisionModule(PackedEncoder):
    """See `PackedEncoder`; each tap "deepstack_0" etc. has its own merger."""

    size: NativeVisionSize

    @property
    def taps(self) -> Mapping[str, int]:
        return {f"deepstack_{i}": layer + 1 for i, layer in enumerate(self.size.deepstack)}

    @property
    def inputs(self) -> Mapping[str, tuple[str, ...]]:
        return {**super().inputs, **dict.fromkeys(self.taps, ())}

    @property
    def freeze_groups(self) -> Mapping[str, str]:
        return {**super().freeze_groups, **dict.fromkeys(self.taps, "connector")}

    @property
    def form(self) -> EncoderForm:
        return EncoderForm(tanh_gelu, fused=True)

    def angles(self, batch: Batch) -> Array:
        return grid_angles(batch["grid"], self.size.head_dim // 2)

    def tap(self, name: str, params: object, x: Array, batch: Batch) -> Array:
        """Return features [rows, tokens / block, out_width] of the hidden states at a tap."""
        return apply(self._end(name), params, x)

    def _end(self, part: str) -> nn.Module:
        if part == "entry":
            return NativeVisionEntry(self.size, self.dtype)
        return Merger(self.size, self.out_width, self.dtype, joined=part != "exit")
