"""Parts of an InternViT tower (arXiv 2312.14238, 2412.05271): class token, layer scale, QK norm.

The 300M tower has LayerNorm and query biases, the 6B tower RMSNorm, no query biases, and queries
and keys normed over all heads together.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from models.attention import Attend, attention
from models.layers import LayerNorm, LayerScale, Linear, RMSNorm, exact_gelu, named, normal
from models.patches import patchify
from models.sizes import VisionSize

Array = jax.Array

# Of ImageNet's pixels, red, green, blue.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
QK_NORM_EPS = 1e-6


class InternVitEntry(nn.Module):
    """uint8 pixels -> class token and patch embeddings, plus learned positions."""

    size: VisionSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, pixels: Array) -> Array:
        s = self.size
        x = patchify(pixels, s.patch_px).astype(jnp.float32)
        # Colours are the innermost of a patch's features.
        mean, std = (
            np.tile(np.array(c, np.float32), s.patch_px**2)[None, None] for c in (MEAN, STD)
        )
        x = (x / 255.0 - mean) / std
        patch = Linear(
            (x.shape[-1],), (s.width,), (None,), ("embed",), self.dtype, bias=True, name="patch"
        )
        init = normal(s.width**-0.5)
        token = self.param("class_token", named(init, "embed"), (s.width,), jnp.float32)
        position = self.param(
            "position", named(init, None, "embed"), (s.tokens_in_tower, s.width), jnp.float32
        )
        x = patch(x.astype(self.dtype))
        first = jnp.broadcast_to(token.astype(self.dtype), (x.shape[0], 1, s.width))
        return jnp.concatenate([first, x], axis=1) + position.astype(self.dtype)[None]


class InternVitBlock(nn.Module):
    """Pre-norm encoder layer whose two branches are scaled per feature; exact GELU."""

    size: VisionSize
    dtype: jnp.dtype
    attend: Attend = attention

    @nn.compact
    def __call__(self, x: Array) -> Array:
        s, dtype = self.size, self.dtype
        width, heads, mlp = (s.width,), (s.n_heads, s.head_dim), (s.mlp,)
        embed, head_names = ("embed",), ("heads", None)
        norm = RMSNorm if s.rms_norm else LayerNorm

        h = norm(s.norm_eps, name="attn_norm")(x)
        q, k, v = (
            Linear(width, heads, embed, head_names, dtype, s.qkv_bias, name=name)(h)
            for name in ("query", "key", "value")
        )
        if s.qk_norm:
            q = RMSNorm(QK_NORM_EPS, head_names, name="query_norm")(q)
            k = RMSNorm(QK_NORM_EPS, head_names, name="key_norm")(k)
        h = self.attend(q, k, v, None, causal=False)
        h = Linear(heads, width, head_names, embed, dtype, bias=True, name="out")(h)
        x = x + LayerScale(name="attn_scale")(h)

        h = norm(s.norm_eps, name="mlp_norm")(x)
        h = Linear(width, mlp, embed, ("mlp",), dtype, bias=True, name="up")(h)
        h = exact_gelu(h)
        h = Linear(mlp, width, ("mlp",), embed, dtype, bias=True, name="down")(h)
        return x + LayerScale(name="mlp_scale")(h)
