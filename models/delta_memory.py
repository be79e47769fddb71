"""What a gated delta net keeps of its rows' tokens so far, so that one more token of each runs
alone: the state, and what the convolution still reaches.

Shape suffixes as in `models.delta`, and L layers, S tokens that are convolved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models.delta import Heads, convolved, delta_rule, last_state, normed

Array = jax.Array


class Kept(NamedTuple):
    """Queries, keys and values before the convolution, of the last S - 1 tokens [B, S - 1, heads,
    size], zeros before the first; float32 states [B, V, H, D]. Those of all layers are stacked."""

    query: Any
    key: Any
    value: Any
    state: Any


_HEADS = ("rows", None, "heads", None)


@dataclass(frozen=True)
class DeltaMemory:
    """The memory of `models.delta.delta_mix`, see `dflop_jax.generate.contract.Memory`; as large
    for long rows as for short ones. `mixed` is what `delta_mix` is given."""

    taps: int
    axes = Kept(_HEADS, _HEADS, _HEADS, ("rows", "heads", None, None))

    def prompt(self, last_B: Array, slots: int, *mixed: Any) -> tuple[Array, Kept]:
        """Whole prompts, and what one layer keeps of them."""
        heads, taps, decay, beta, ids = mixed
        tokens = ids.shape[1]
        known = jnp.arange(tokens)[None] <= last_B[:, None]
        q, k, v = convolved(heads, taps, ids)
        out = delta_rule(q, k, v, decay, beta, ids)
        decay, beta = (jnp.where(known[..., None], a, 0.0) for a in (decay, beta))
        back = jnp.arange(self.taps - 1) - self.taps + 2  # up to the last token
        at = (last_B[:, None] + back[None])[:, :, None, None]

        def before(a: Array) -> Array:
            here = jnp.take_along_axis(a, jnp.maximum(at, 0), axis=1)
            return jnp.where(at >= 0, here, jnp.zeros_like(here))

        q_BSKH, k_BSKH, v_BSVD = map(before, heads)
        return out, Kept(q_BSKH, k_BSKH, v_BSVD, last_state(k, v, decay, beta))

    def token(self, kept: Kept, layer: Array, at_B: Array, *mixed: Any) -> tuple[Array, Kept]:
        """One more token of each row, in the layer of that number."""
        heads, taps, decay, beta, _ = mixed
        reached = [
            jnp.concatenate([a[layer], new], axis=1) for a, new in zip(kept[:3], heads, strict=True)
        ]
        q, k, v = (
            jax.nn.silu(
                jnp.sum(a.astype(jnp.float32) * own.astype(jnp.float32)[None], axis=1)
            ).astype(a.dtype)
            for a, own in zip(reached, taps, strict=True)
        )
        out, state = _step(kept.state[layer], (q, k, v), decay[:, 0], beta[:, 0])
        now = (*(a[:, 1:] for a in reached), state)
        kept = Kept(*(a.at[layer].set(new) for a, new in zip(kept, now, strict=True)))
        return out[:, None], kept

    def grown(self, kept: Kept, slots: int) -> Kept:
        """The same."""
        return kept


def _step(state_BVHD: Array, heads: Heads, decay_BV: Array, beta_BV: Array) -> tuple[Array, Array]:
    """What a token of each row reads, [B, V, D], and the state after it."""
    q_BKH, k_BKH, v_BVD = heads
    group = v_BVD.shape[1] // k_BKH.shape[1]
    q, k = (jnp.repeat(normed(a), group, axis=1) for a in (q_BKH, k_BKH))
    left = jnp.exp(decay_BV)[..., None, None] * state_BVHD
    error = v_BVD.astype(jnp.float32) - jnp.einsum("bvhd,bvh->bvd", left, k)
    state = left + k[..., None] * (beta_BV[..., None] * error)[:, :, None]
    out = jnp.einsum("bvhd,bvh->bvd", state, q) * q.shape[-1] ** -0.5
    return out.astype(v_BVD.dtype), state
