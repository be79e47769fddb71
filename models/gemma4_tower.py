"""Gemma 4's vision tower: pictures and frames at their own aspect ratio, packed into rows; the mean
of each block of patches is a token. `models.gemma4` defines the order of patches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.attention import AttentionFunction, attention
from models.embedding import embed
from models.encoder import EncoderForm
from models.gemma_sizes import Gemma4VisionSize
from models.layers import Linear, Names, RMSNorm, named_init, normal, tanh_gelu, untrained_param
from models.linen_module import Batch
from models.packed_encoder import PackedEncoder
from models.rotary import angles_of, rotate

Array = jax.Array
INF = float("inf")
LINEAR_NAMES = ("query", "key", "value", "out", "gate", "up", "down")  # matrices of a layer
# Clipping bounds of a matrix, with the values that clip nothing.
NO_CLIPPING = {"input_min": -INF, "input_max": INF, "output_min": -INF, "output_max": INF}


class Gemma4VisionEntry(nn.Module):
    """Embeds uint8 patches and adds a learnt position of the column and one of the row."""

    size: Gemma4VisionSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, patches: Array, grid: Array) -> Array:
        s = self.size
        x = s.processing.normalize(patches, innermost=False).astype(self.dtype)
        x = Linear((s.patch_values,), (s.width,), (None,), ("embed",), self.dtype, name="patch")(x)
        init = named_init(normal(s.width**-0.5), None, None, "embed")
        table = self.param("position", init, (2, s.side, s.width), jnp.float32).astype(self.dtype)
        return x + embed(table[0], grid[..., 1]) + embed(table[1], grid[..., 0])


class Gemma4VisionBlock(nn.Module):
    """A layer: norms before and after attention and MLP, normed queries, keys and values."""

    size: Gemma4VisionSize
    dtype: jnp.dtype
    attend: AttentionFunction = attention

    @nn.compact
    def __call__(
        self, x: Array, segment_ids: Array | None = None, angles: Array | None = None
    ) -> Array:
        s, embed_names, mlp = self.size, ("embed",), ("mlp",)
        norm = partial(RMSNorm, s.norm_eps)
        q_shape, kv_shape = (s.n_heads, s.head_dim), (s.n_kv_heads, s.head_dim)
        q_names, kv_names = ("heads", None), ("kv_heads", None)

        h = norm(name="attn_norm")(x)
        q = self.linear("query", h, q_shape, embed_names, q_names)
        k = self.linear("key", h, kv_shape, embed_names, kv_names)
        v = self.linear("value", h, kv_shape, embed_names, kv_names)
        q = norm((None,), name="query_norm")(q)
        k = norm((None,), name="key_norm")(k)
        v = norm((None,), scaled=False)(v)
        if angles is not None:
            q, k = _rotate_by_grid(q, angles), _rotate_by_grid(k, angles)
        h = self.attend(q, k, v, segment_ids, causal=False, scale=1.0)
        h = self.linear("out", h, (s.width,), q_names, embed_names)
        x = x + norm(name="attn_out_norm")(h)

        h = norm(name="mlp_norm")(x)
        gate = self.linear("gate", h, (s.mlp,), embed_names, mlp)
        h = tanh_gelu(gate) * self.linear("up", h, (s.mlp,), embed_names, mlp)
        h = self.linear("down", h, (s.width,), mlp, embed_names)
        return x + norm(name="mlp_out_norm")(h)

    def linear(
        self, name: str, x: Array, out_shape: tuple[int, ...], in_names: Names, out_names: Names
    ) -> Array:
        """Multiply by a matrix; input and output are clipped if the size says so."""
        fan_in = x.shape[-len(in_names) :]
        product = Linear(fan_in, out_shape, in_names, out_names, self.dtype, name=name)
        if not self.size.clipped:
            return product(x)
        low, high, out_low, out_high = (
            untrained_param(self, f"{name}_{bound}", (), value).astype(self.dtype)
            for bound, value in NO_CLIPPING.items()
        )
        return jnp.clip(product(jnp.clip(x, low, high)), out_low, out_high)


def _rotate_by_grid(x: Array, angles: Array) -> Array:
    """Rotate heads: the first half by the column, the second half by the row."""
    halves = zip(jnp.split(x, 2, axis=-1), jnp.split(angles, 2, axis=-1), strict=True)
    return jnp.concatenate([rotate(half, half_angles) for half, half_angles in halves], axis=-1)


class Gemma4VisionExit(nn.Module):
    """The mean of each block of patches times the root of the width, shifted and scaled by fixed
    numbers if the size says so, all in float32; a norm without a scale; a projection."""

    size: Gemma4VisionSize
    out_width: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array) -> Array:
        s = self.size
        items, tokens, _ = x.shape
        x = x[:, : tokens - tokens % s.block].astype(jnp.float32)
        x = x.reshape(items, tokens // s.block, s.block, s.width).mean(axis=2) * s.width**0.5
        if s.standardized:
            shift = untrained_param(self, "std_bias", (s.width,), 0.0)
            x = (x - shift[None, None]) * untrained_param(self, "std_scale", (s.width,), 1.0)[
                None, None
            ]
        x = RMSNorm(s.norm_eps, scaled=False)(x.astype(self.dtype))
        width, out_shape = (s.width,), (self.out_width,)
        return Linear(width, out_shape, (None,), ("embed",), self.dtype, name="projection")(x)


@dataclass(frozen=True)
class Gemma4VisionModule(PackedEncoder):
    """The tower as a module of the contract; see `PackedEncoder`."""

    size: Gemma4VisionSize

    @property
    def float32_names(self) -> frozenset[str]:
        """Names of float32 parameters, which are not trained."""
        bounds = {f"{name}_{bound}" for name in LINEAR_NAMES for bound in NO_CLIPPING}
        return frozenset(bounds | {"std_bias", "std_scale"})

    @property
    def form(self) -> EncoderForm:
        """Only these properties of its layers are like those of other towers."""
        return EncoderForm(tanh_gelu, RMSNorm, (False,) * 3)

    def angles(self, batch: Batch) -> Array:
        grid, quarter = batch["grid"], self.size.head_dim // 4
        row, column = (angles_of(grid[..., i], quarter, self.size.theta) for i in range(2))
        return jnp.concatenate([column, row], axis=-1)

    def _block(self) -> nn.Module:
        return Gemma4VisionBlock(self.size, self.dtype, self.attend)

    def _end(self, part: str) -> nn.Module:
        if part == "entry":
            return Gemma4VisionEntry(self.size, self.dtype)
        return Gemma4VisionExit(self.size, self.out_width, self.dtype)
