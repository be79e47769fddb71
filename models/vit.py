"""Vision tower of SigLIP form (arXiv 2303.15343): patches, pre-norm encoder, connector as exit.

Full attention within a tile; an item is a tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.attention import attention, attention_flops
from models.connector import Connector, connector_flops
from models.layers import LayerNorm, Linear, apply, axis_names, init_values, named, normal
from models.sizes import VisionSize

Array = jax.Array
Batch = Mapping[str, Array]


def patchify(pixels: Array, patch_px: int) -> Array:
    """[items, px, px, channels] -> [items, patches, patch_px^2 * channels], patches in row order.

    Each patch is flattened (row, column, channel); pixels beyond the last whole patch are left out,
    as a convolution with stride `patch_px` and no padding does.
    """
    items, height, width, channels = pixels.shape
    rows, cols = height // patch_px, width // patch_px
    x = pixels[:, : rows * patch_px, : cols * patch_px]
    x = x.reshape(items, rows, patch_px, cols, patch_px, channels).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(items, rows * cols, patch_px * patch_px * channels)


class EntryModule(nn.Module):
    """uint8 pixels -> patch embeddings plus learned positions."""

    size: VisionSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, pixels: Array) -> Array:
        s = self.size
        x = patchify(pixels, s.patch_px).astype(jnp.float32) / 127.5 - 1.0  # mean 0.5, std 0.5
        patch = Linear(
            (x.shape[-1],), (s.width,), (None,), ("embed",), self.dtype, bias=True, name="patch"
        )
        init = named(normal(s.width**-0.5), None, "embed")
        position = self.param("position", init, (s.patches_per_tile, s.width), jnp.float32)
        return patch(x.astype(self.dtype)) + position.astype(self.dtype)[None]


class Block(nn.Module):
    """Pre-norm encoder layer: multi-head attention with biases, GELU (tanh form) MLP."""

    size: VisionSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array) -> Array:
        s, dtype = self.size, self.dtype
        width, heads, mlp = (s.width,), (s.n_heads, s.head_dim), (s.mlp,)
        embed, head_names = ("embed",), ("heads", None)
        residual = (2 * s.n_layers) ** -0.5  # keeps the sum of all branches of order one

        h = LayerNorm(s.norm_eps, name="attn_norm")(x)
        q, k, v = (
            Linear(width, heads, embed, head_names, dtype, bias=True, name=name)(h)
            for name in ("query", "key", "value")
        )
        h = attention(q, k, v, None, causal=False)
        std = residual * s.width**-0.5
        x = x + Linear(heads, width, head_names, embed, dtype, bias=True, std=std, name="out")(h)

        h = LayerNorm(s.norm_eps, name="mlp_norm")(x)
        h = jax.nn.gelu(Linear(width, mlp, embed, ("mlp",), dtype, bias=True, name="up")(h))
        std = residual * s.mlp**-0.5
        return x + Linear(mlp, width, ("mlp",), embed, dtype, bias=True, std=std, name="down")(h)


@dataclass(frozen=True)
class VisionModule:
    """The tower and its connector as the engine sees them.

    Features come out as [tiles, tokens_per_tile, out_width]. The tower's final norm, if any, is
    part of the exit and so freezes with the connector.
    """

    size: VisionSize
    out_width: int
    dtype: jnp.dtype

    @property
    def n_layers(self) -> int:
        return self.size.n_layers

    @property
    def tied(self) -> bool:
        return False

    @property
    def inputs(self) -> Mapping[str, tuple[str, ...]]:
        return {"entry": ("pixels",), "layers": (), "exit": ()}

    @property
    def freeze_groups(self) -> Mapping[str, str]:
        return {"entry": "vision", "layers": "vision", "exit": "connector"}

    def field_spec(self, name: str, items: int, tokens: int) -> jax.ShapeDtypeStruct:
        """Shape and dtype of `pixels` for `items` tiles; `tokens` is fixed by the tile."""
        if name != "pixels":
            raise ValueError(f"the vision module has no field {name!r}; it reads only 'pixels'")
        px = self.size.tile_px
        return jax.ShapeDtypeStruct((items, px, px, 3), jnp.uint8)

    def _part(self, part: str) -> tuple[nn.Module, Any]:
        """The Linen module of a part and what its input looks like."""
        s = self.size
        hidden = jax.ShapeDtypeStruct((1, s.patches_per_tile, s.width), self.dtype)
        return {
            "entry": (EntryModule(s, self.dtype), self.field_spec("pixels", 1, 0)),
            "layers": (Block(s, self.dtype), hidden),
            "exit": (Connector(s, self.out_width, self.dtype), hidden),
        }[part]

    def init(self, part: str, key: Array) -> Any:
        module, example = self._part(part)
        return init_values(module, key, example)

    def logical_axes(self, part: str) -> Any:
        return axis_names(*self._part(part))

    def entry(self, params: Any, batch: Batch) -> Array:
        return apply(EntryModule(self.size, self.dtype), params, batch["pixels"])

    def layer(self, params: Any, x: Array, batch: Batch) -> Array:
        return apply(Block(self.size, self.dtype), params, x)

    def exit(self, params: Any, x: Array, batch: Batch, entry: Any = None) -> Array:
        return apply(Connector(self.size, self.out_width, self.dtype), params, x)

    def flops(self, part: str, items: int, tokens: int) -> float:
        """Matrix-product FLOPs of `items` tiles; `tokens` is fixed by the tile."""
        s = self.size
        n = float(items * s.patches_per_tile)
        if part == "entry":
            return 2 * n * 3 * s.patch_px**2 * s.width
        if part == "layers":
            products = 4 * s.width**2 + 2 * s.width * s.mlp
            return 2 * n * products + attention_flops(
                items, s.patches_per_tile, s.n_heads, s.head_dim
            )
        return connector_flops(s, self.out_width, items)
