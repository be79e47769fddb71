"""The memory of a gated delta net for decoding one more token per row: the state, and the tokens
that the convolution still reads.

Shape suffixes as in `models.delta`, and L layers, S tokens that are convolved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models.delta import Heads, convolve_heads, delta_rule, last_state, normalize

Array = jax.Array


class DeltaCache(NamedTuple):
    """Queries, keys and values of the last S - 1 tokens before the convolution [B, S - 1, heads,
    size], zeros before the first token; float32 states [B, V, H, D]. Layers are stacked."""

    query: Any
    key: Any
    value: Any
    state: Any


_HEADS = ("rows", None, "heads", None)


@dataclass(frozen=True)
class DeltaMemory:
    """The memory of `models.delta.mix_tokens`, see `dflop_jax.generate.decoding.Memory`. Its size
    does not depend on the rows' lengths. `mix_args` are the arguments of `mix_tokens`."""

    taps: int
    axes = DeltaCache(_HEADS, _HEADS, _HEADS, ("rows", "heads", None, None))

    def prefill(self, last_B: Array, slots: int, *mix_args: Any) -> tuple[Array, DeltaCache]:
        """Run whole prompts; return the output and one layer's cache."""
        heads, taps, decay, beta, ids = mix_args
        tokens = ids.shape[1]
        is_prompt = jnp.arange(tokens)[None] <= last_B[:, None]
        q, k, v = convolve_heads(heads, taps, ids)
        output = delta_rule(q, k, v, decay, beta, ids)
        decay, beta = (jnp.where(is_prompt[..., None], a, 0.0) for a in (decay, beta))
        offsets = jnp.arange(self.taps - 1) - self.taps + 2  # up to the last token
        token_index = (last_B[:, None] + offsets[None])[:, :, None, None]

        def last_tokens(a: Array) -> Array:
            taken = jnp.take_along_axis(a, jnp.maximum(token_index, 0), axis=1)
            return jnp.where(token_index >= 0, taken, jnp.zeros_like(taken))

        q_BSKH, k_BSKH, v_BSVD = map(last_tokens, heads)
        return output, DeltaCache(q_BSKH, k_BSKH, v_BSVD, last_state(k, v, decay, beta))

    def decode_token(
        self, cache: DeltaCache, layer: Array, place_B: Array, *mix_args: Any
    ) -> tuple[Array, DeltaCache]:
        """Run one more token of each row, in layer number `layer`."""
        heads, taps, decay, beta, _ = mix_args
        window = [
            jnp.concatenate([a[layer], new], axis=1)
            for a, new in zip(cache[:3], heads, strict=True)
        ]
        q, k, v = (
            jax.nn.silu(
                jnp.sum(a.astype(jnp.float32) * taps_SKH.astype(jnp.float32)[None], axis=1)
            ).astype(a.dtype)
            for a, taps_SKH in zip(window, taps, strict=True)
        )
        output, state = _step(cache.state[layer], (q, k, v), decay[:, 0], beta[:, 0])
        updated = (*(a[:, 1:] for a in window), state)
        cache = DeltaCache(*(a.at[layer].set(new) for a, new in zip(cache, updated, strict=True)))
        return output[:, None], cache

    def grow(self, cache: DeltaCache, slots: int) -> DeltaCache:
        """Return the cache unchanged."""
        return cache


def _step(state_BVHD: Array, heads: Heads, decay_BV: Array, beta_BV: Array) -> tuple[Array, Array]:
    """Return each row's read of a token, [B, V, D], and the state after the token."""
    q_BKH, k_BKH, v_BVD = heads
    group = v_BVD.shape[1] // k_BKH.shape[1]
    q, k = (jnp.repeat(normalize(a), group, axis=1) for a in (q_BKH, k_BKH))
    decayed = jnp.exp(decay_BV)[..., None, None] * state_BVHD
    error = v_BVD.astype(jnp.float32) - jnp.einsum("bvhd,bvh->bvd", decayed, k)
    state = decayed + k[..., None] * (beta_BV[..., None] * error)[:, :, None]
    output = jnp.einsum("bvhd,bvh->bvd", state, q) * q.shape[-1] ** -0.5
    return output.astype(v_BVD.dtype), state
