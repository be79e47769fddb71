"""Vision tower: patches, pre-norm encoder, connector as exit.

The parts here are of SigLIP form (arXiv 2303.15343), those of InternViT stand in
`models/internvit.py`. Full attention within a tile; an item is a tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.attention import Attend, attend_by, attention, attention_flops
from models.connector import Connector, connector_flops
from models.encoder import Encoder
from models.internvit import InternVitBlock, InternVitEntry
from models.layers import LayerNorm, Linear, named, normal
from models.patches import patchify
from models.sizes import VisionSize

Array = jax.Array
Batch = Mapping[str, Array]


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
    attend: Attend = attention

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
        h = self.attend(q, k, v, None, causal=False)
        std = residual * s.width**-0.5
        x = x + Linear(heads, width, head_names, embed, dtype, bias=True, std=std, name="out")(h)

        h = LayerNorm(s.norm_eps, name="mlp_norm")(x)
        h = jax.nn.gelu(Linear(width, mlp, embed, ("mlp",), dtype, bias=True, name="up")(h))
        std = residual * s.mlp**-0.5
        return x + Linear(mlp, width, ("mlp",), embed, dtype, bias=True, std=std, name="down")(h)


@dataclass(frozen=True)
class VisionModule(Encoder):
    """The tower and its connector as the engine sees them.

    Features come out as [tiles, tokens_per_tile, out_width]. The tower's final norm, if any, is
    part of the exit and so freezes with the connector.
    """

    size: VisionSize
    out_width: int
    dtype: jnp.dtype
    attention_kernel: str = "auto"

    @property
    def item_tokens(self) -> int:
        return self.size.tokens_in_tower

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

    def _linen(self, part: str) -> nn.Module:
        s, dtype = self.size, self.dtype
        if part == "exit":
            return Connector(s, self.out_width, dtype)
        if part == "entry":
            return EntryModule(s, dtype) if s.form == "siglip" else InternVitEntry(s, dtype)
        block = Block if s.form == "siglip" else InternVitBlock
        return block(s, dtype, attend_by(self.attention_kernel))

    def flops(self, part: str, items: int, tokens: int) -> float:
        """Matrix-product FLOPs of `items` tiles; `tokens` is fixed by the tile."""
        s = self.size
        n = float(items * s.tokens_in_tower)
        if part == "entry":
            return 2.0 * items * s.patches_per_tile * 3 * s.patch_px**2 * s.width
        if part == "layers":
            products = 4 * s.width**2 + 2 * s.width * s.mlp
            return 2 * n * products + attention_flops(
                items, s.tokens_in_tower, s.n_heads, s.head_dim
            )
        return connector_flops(s, self.out_width, items)
