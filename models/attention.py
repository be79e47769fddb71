"""Attention over packed samples: the reference that runs on every backend.

Shape suffixes: B rows, T queries and S keys (tokens), N query heads, K kv heads, G query heads per
kv head, H head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def attention(
    q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, segment_ids: Array | None, *, causal: bool
) -> Array:
    """Softmax attention in which a token sees only tokens of its own segment.

    Query head n reads kv head n // G, G = N / K. Padding (segment 0) is a segment of its own: it
    sees itself, so no row of the softmax is empty and none gives NaN. Masked weights are exactly
    0, so a segment's output does not depend, to the bit, on what else is packed beside it.

    Args:
      q_BTNH: queries [items, tokens, heads, head_dim].
      k_BSKH, v_BSKH: keys and values [items, tokens, kv_heads, head_dim].
      segment_ids: int [items, tokens], or None where all tokens of a row see each other.
      causal: whether a token sees only itself and earlier ones.

    Returns:
      [items, tokens, heads, head_dim] in the dtype of the queries; the softmax is float32.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H) * H**-0.5
    scores_BKGTS = jnp.einsum(
        "BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32
    )
    mask_BTS = None if segment_ids is None else segment_ids[:, :, None] == segment_ids[:, None, :]
    if causal:
        past_BTS = jnp.tri(T, dtype=bool)[None]
        mask_BTS = past_BTS if mask_BTS is None else mask_BTS & past_BTS
    if mask_BTS is not None:
        lowest = jnp.finfo(jnp.float32).min
        scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS, lowest)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v_BSKH.dtype)
    out_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS, v_BSKH)
    return out_BTKGH.reshape(B, T, N, H)


def attention_flops(items: int, tokens: int, heads: int, head_dim: int) -> float:
    """FLOPs of the two products; masked entries are computed too, so causal costs the same."""
    return 4.0 * items * tokens**2 * heads * head_dim
