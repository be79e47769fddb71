"""Layers of Wan's diffusion transformer, as Linen modules on packed rows.

A row's tokens have roles (see `models.wan`): layers change a clip's tokens; tokens of time and text
keep the entry's output, and every layer reads them.

Shape suffixes: B rows, T tokens, S maximum of a row's pieces, W width, N heads, H head dim.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models.attention import AttentionFunction, attention, masked_attention
from models.layers import LayerNorm, Linear, RMSNorm, named_init, normal, tanh_gelu
from models.rotary import WAVELENGTH_BASE
from models.wan_sizes import WanSize

Array = jax.Array

SHIFTS = 6  # shift, scale and gate of a layer's attention, and of its MLP
TIME_TOKENS = SHIFTS + 1  # of a piece: the shifts, and the time itself, which the head reads
TEXT, CLIP = TIME_TOKENS + 1, TIME_TOKENS + 2  # roles; time has 1 to TIME_TOKENS, padding 0
MIN_CLIP_TOKENS = TIME_TOKENS + 2
QUERY_BLOCK = 512  # queries of a long row whose scores for the text are in memory at once


def time_waves(time_BT: Array, dim: int) -> Array:
    """Return cosines and sines of times, float32 [B, T, dim]."""
    half = dim // 2
    frequencies = WAVELENGTH_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = time_BT[..., None] * frequencies[None, None]
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def rotate_pairs(x_BTNH: Array, angles: Array) -> Array:
    """Rotate heads by angles [B, T, H / 2]; a pair is two neighbouring coordinates."""
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    pairs = x_BTNH.astype(jnp.float32).reshape(*x_BTNH.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    both = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return both.reshape(x_BTNH.shape).astype(x_BTNH.dtype)


def clip_angles(positions: Array, size: WanSize) -> Array:
    """Return angles [B, T, H / 2] of positions int [B, T, 3]: pairs of time, row, then column."""
    angles = []
    for axis, pairs in enumerate(size.rotary_pairs):
        frequencies = size.theta ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
        angles.append(positions[..., axis, None].astype(jnp.float32) * frequencies[None, None])
    return jnp.concatenate(angles, axis=-1)


def gather_clip_tokens(x_BTW: Array, segment_ids: Array, first: int, n: int) -> Array:
    """Gather tokens `first` to `first + n` of each token's piece: float32 [B, T, n, W].

    This is a matrix product, whose gradient adds up in a fixed order.
    """
    B, T, W = x_BTW.shape
    max_clips = max(1, T // MIN_CLIP_TOKENS)
    is_in_clip_BTS = segment_ids[..., None] == jnp.arange(1, max_clips + 1)[None, None]
    start_BS = jnp.argmax(is_in_clip_BTS, axis=1)
    token_index = (start_BS[..., None] + first + jnp.arange(n)[None, None]).reshape(B, -1, 1)
    values = jnp.take_along_axis(x_BTW, jnp.minimum(token_index, T - 1), axis=1)
    values = values.reshape(B, max_clips, n, W).astype(jnp.float32)
    one_hot_BTS = is_in_clip_BTS.astype(jnp.float32)
    return jnp.einsum("BTS,BSnW->BTnW", one_hot_BTS, values, precision=jax.lax.Precision.HIGHEST)


def normalize(x: Array, eps: float) -> Array:
    """Norm to mean 0 and variance 1 along the last dim, in float32."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + eps)


def attend_to_text(
    q_BTNH: Array, k_BTNH: Array, v_BTNH: Array, role: Array, segment_ids: Array
) -> Array:
    """Attend from a clip's tokens to their piece's text; other outputs are meaningless."""
    query_ids = jnp.where(role == CLIP, segment_ids, 0)
    key_ids = jnp.where(role == TEXT, segment_ids, -1)

    def attend_block(q: Array, query_ids: Array) -> Array:
        return masked_attention(q, k_BTNH, v_BTNH, query_ids[:, :, None] == key_ids[:, None])

    B, T, N, H = q_BTNH.shape
    if T <= QUERY_BLOCK or T % QUERY_BLOCK:
        return attend_block(q_BTNH, query_ids)
    blocks = jnp.moveaxis(q_BTNH.reshape(B, -1, QUERY_BLOCK, N, H), 1, 0)
    ids = jnp.moveaxis(query_ids.reshape(B, -1, QUERY_BLOCK), 1, 0)
    output = jax.lax.map(lambda block: jax.checkpoint(attend_block)(*block), (blocks, ids))
    return checkpoint_name(jnp.moveaxis(output, 0, 1).reshape(B, T, N, H), "attention")


class WanEntry(nn.Module):
    """Embeds patches, times and text as hidden states [B, T, W], each token by its role."""

    size: WanSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, latents: Array, time: Array, role: Array, text: Array) -> Array:
        s, dtype = self.size, self.dtype
        width, whole = (s.width,), ("embed",)

        def linear(n: int, out_shape: tuple[int, ...], name: str, *names: str | None) -> Linear:
            return Linear((n,), out_shape, (None,), names or whole, dtype, bias=True, name=name)

        clip = linear(s.patch_values, width, "patch")(latents.astype(dtype))
        text_states = linear(s.text_width, width, "text_hidden")(text.astype(dtype))
        text_states = linear(s.width, width, "text_out")(tanh_gelu(text_states))
        time_states = linear(s.freq_dim, width, "time_hidden")(
            time_waves(time, s.freq_dim).astype(dtype)
        )
        time_states = linear(s.width, width, "time_out")(jax.nn.silu(time_states))
        shifts = linear(s.width, (SHIFTS, s.width), "shifts", None, "embed")(
            jax.nn.silu(time_states)
        )
        has_role = role[..., None] == jnp.arange(1, SHIFTS + 1)[None, None]
        x = jnp.sum(jnp.where(has_role[..., None], shifts, jnp.zeros_like(shifts)), axis=2)
        for kind, values in ((TIME_TOKENS, time_states), (TEXT, text_states), (CLIP, clip)):
            x = jnp.where((role == kind)[..., None], values, x)
        return x


class WanBlock(nn.Module):
    """Attention within the clip and to its text, and an MLP; time shifts, scales and gates them."""

    size: WanSize
    dtype: jnp.dtype
    attend: AttentionFunction = attention

    @nn.compact
    def __call__(self, x: Array, role: Array, positions: Array, segment_ids: Array) -> Array:
        s, dtype = self.size, self.dtype
        init = named_init(normal(s.width**-0.5), None, "embed")
        table = self.param("modulation", init, (SHIFTS, s.width), jnp.float32)
        by_time = (
            gather_clip_tokens(x, segment_ids, 0, SHIFTS) + table.astype(jnp.float32)[None, None]
        )
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = jnp.moveaxis(by_time, 2, 0)
        is_clip = role == CLIP

        h = (normalize(x, s.norm_eps) * (1.0 + scale) + shift).astype(dtype)
        angles = clip_angles(positions, s)
        q, k, v = self._heads("self", h, h)
        attention_ids = jnp.maximum(2 * segment_ids - (~is_clip).astype(segment_ids.dtype), 0)
        h = self.attend(
            rotate_pairs(q, angles), rotate_pairs(k, angles), v, attention_ids, causal=False
        )
        y = x.astype(jnp.float32) + self._output_projection("self", h).astype(jnp.float32) * gate

        h = LayerNorm(s.norm_eps, name="cross_norm")(y).astype(dtype)
        h = attend_to_text(*self._heads("cross", h, x), role, segment_ids)
        y = y + self._output_projection("cross", h).astype(jnp.float32)

        h = (normalize(y, s.norm_eps) * (1.0 + mlp_scale) + mlp_shift).astype(dtype)
        width, mlp, embed = (s.width,), (s.mlp,), ("embed",)
        h = tanh_gelu(Linear(width, mlp, embed, ("mlp",), dtype, True, name="up")(h))
        std = (2 * s.n_layers) ** -0.5 * s.mlp**-0.5
        h = Linear(mlp, width, ("mlp",), embed, dtype, True, std, name="down")(h)
        y = y + h.astype(jnp.float32) * mlp_gate
        return jnp.where(is_clip[..., None], y.astype(x.dtype), x)

    def _heads(self, name: str, query_ids: Array, key_ids: Array) -> tuple[Array, Array, Array]:
        """Return queries, keys and values [B, T, N, H]; the first two are normed over all heads."""
        s = self.size
        shape, names = (s.n_heads, s.head_dim), ("heads", None)

        def linear(kind: str, x: Array) -> Array:
            projection = Linear(
                (s.width,), shape, ("embed",), names, self.dtype, True, name=f"{name}_{kind}"
            )
            return projection(x)

        q = RMSNorm(s.norm_eps, names, name=f"{name}_query_norm")(linear("query", query_ids))
        k = RMSNorm(s.norm_eps, names, name=f"{name}_key_norm")(linear("key", key_ids))
        return q, k, linear("value", key_ids)

    def _output_projection(self, name: str, h: Array) -> Array:
        s = self.size
        std = (2 * s.n_layers) ** -0.5 * s.width**-0.5
        names, heads = ("heads", None), (s.n_heads, s.head_dim)
        return Linear(
            heads, (s.width,), names, ("embed",), self.dtype, True, std, name=f"{name}_out"
        )(h)


class WanHead(nn.Module):
    """A norm that time shifts and scales, and one linear layer: float32 [B, T, patch values]."""

    size: WanSize
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array, segment_ids: Array) -> Array:
        s = self.size
        init = named_init(normal(s.width**-0.5), None, "embed")
        table = self.param("modulation", init, (2, s.width), jnp.float32)
        by_time = (
            gather_clip_tokens(x, segment_ids, SHIFTS, 1) + table.astype(jnp.float32)[None, None]
        )
        shift, scale = jnp.moveaxis(by_time, 2, 0)
        h = (normalize(x, s.norm_eps) * (1.0 + scale) + shift).astype(self.dtype)
        values = (s.patch_values,)
        projection = Linear(
            (s.width,), values, ("embed",), (None,), self.dtype, True, 0.02, name="out"
        )
        return projection(h).astype(jnp.float32)
