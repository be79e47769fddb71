"""Vision towers: patches, pre-norm encoder, connector as exit. An item is a tile.

Two forms: SigLIP (arXiv 2303.15343) and InternViT (arXiv 2312.14238, 2412.05271), which has a class
token, layer scale and, in the 6B tower, RMSNorm and normed queries and keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.connector import Connector
from models.encoder import Encoder, EncoderForm
from models.layers import LayerNorm, Linear, RMSNorm, exact_gelu, named_init, normal, tanh_gelu
from models.processors import IMAGENET_COLOURS, SYMMETRIC
from models.sizes import VisionSize

Array = jax.Array


def patchify(pixels: Array, patch_px: int) -> Array:
    """Cut [items, px, px, channels] into [items, patches, patch_px^2 * channels], in row order.

    Each patch is flattened (row, column, channel); pixels after the last whole patch are ignored,
    as in a convolution with stride `patch_px` and no padding.
    """
    items, height, width, channels = pixels.shape
    rows, cols = height // patch_px, width // patch_px
    x = pixels[:, : rows * patch_px, : cols * patch_px]
    x = x.reshape(items, rows, patch_px, cols, patch_px, channels).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(items, rows * cols, patch_px * patch_px * channels)


class VisionEntry(nn.Module):
    """Embeds patches of uint8 pixels and adds learned positions; in internvit, a class token is
    first."""

    size: VisionSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, pixels: Array) -> Array:
        s = self.size
        published = SYMMETRIC if s.form == "siglip" else IMAGENET_COLOURS
        patches = patchify(pixels, s.patch_px)
        x = (s.processing or published).normalize(patches, innermost=True).astype(self.dtype)
        fan_in, width = (x.shape[-1],), (s.width,)
        x = Linear(fan_in, width, (None,), ("embed",), self.dtype, bias=True, name="patch")(x)
        init = normal(s.width**-0.5)
        if s.form == "internvit":
            token = self.param("class_token", named_init(init, "embed"), width, jnp.float32)
            first = jnp.broadcast_to(token.astype(self.dtype), (x.shape[0], 1, s.width))
            x = jnp.concatenate([first, x], axis=1)
        shape = (s.tokens_in_tower, s.width)
        position = self.param("position", named_init(init, None, "embed"), shape, jnp.float32)
        return x + position.astype(self.dtype)[None]


@dataclass(frozen=True)
class VisionModule(Encoder):
    """See `Encoder`; the tower's final norm, if any, freezes with the connector."""

    size: VisionSize

    @property
    def item_tokens(self) -> int:
        return self.size.tokens_in_tower

    @property
    def inputs(self) -> Mapping[str, tuple[str, ...]]:
        return {"entry": ("pixels",), "layers": (), "exit": ()}

    @property
    def freeze_groups(self) -> Mapping[str, str]:
        return {"entry": "vision", "layers": "vision", "exit": "connector"}

    @property
    def form(self) -> EncoderForm:
        s = self.size
        if s.form == "siglip":
            return EncoderForm(tanh_gelu)
        norm = RMSNorm if s.rms_norm else LayerNorm
        return EncoderForm(exact_gelu, norm, (s.qkv_bias,) * 3, s.qk_norm, scaled=True)

    def field_spec(self, name: str, items: int, tokens: int) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of `pixels` for `items` tiles; the tile fixes `tokens`."""
        if name != "pixels":
            raise ValueError(f"the vision module has no field {name!r}; it reads only 'pixels'")
        px = self.size.tile_px
        return jax.ShapeDtypeStruct((items, px, px, 3), jnp.uint8)

    def _end(self, part: str) -> nn.Module:
        if part == "entry":
            return VisionEntry(self.size, self.dtype)
        return Connector(self.size, self.out_width, self.dtype)
