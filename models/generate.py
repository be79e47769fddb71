"""Decoding one token at a time: a cache of keys and values in static shapes.

`prefill` runs the prompts, padded to one length, and keeps their keys and values; `decode` adds one
token to each row. Slot s of a row's cache is the token at position s, so what pads a prompt is
overwritten by the answer, and a token sees the slots up to its own.

Shape suffixes: L layers, B rows, T tokens, S slots, N query heads, K kv heads, H head dim, V vocab.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from models.attention import masked_attention

if TYPE_CHECKING:
    from models.decoder import DecoderModule

Array = jax.Array


class Cache(NamedTuple):
    """Keys and values of the tokens so far."""

    keys_LBSKH: Array
    values_LBSKH: Array


def prefill(
    module: DecoderModule, params: Any, batch: Mapping[str, Array], last_B: Array, slots: int
) -> tuple[Array, Cache]:
    """Run one prompt per row.

    Args:
      params: all of the decoder's, layers stacked.
      batch: fields of its entry and layers, [B, T]; positions count from 0 from the first token on.
      last_B: int, index of each prompt's last token; what follows it is padding.
      slots: size of the cache, at least T: positions that prompt and answer may take.

    Returns:
      float32 logits [B, V] of what follows the prompts, and the cache.
    """

    def layer(x: Array, p: Any) -> tuple[Array, Cache]:
        seen: list[Cache] = []

        def attend(q: Array, k: Array, v: Array, ids: Array, *, causal: bool) -> Array:
            seen.append(Cache(k, v))
            return module.attend(q, k, v, ids, causal=causal)

        return module.layer(p, x, batch, attend), seen[0]

    x_BTD, cache = jax.lax.scan(layer, module.entry(params["entry"], batch), _layers(params))
    free = slots - x_BTD.shape[1]
    assert free >= 0, (slots, x_BTD.shape)
    cache = jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (0, 0), (0, free), (0, 0), (0, 0))), cache)
    last_B1D = jnp.take_along_axis(x_BTD, last_B[:, None, None], axis=1)
    return module.logits(params["exit"], last_B1D, params["entry"])[:, 0], cache


def decode(
    module: DecoderModule, params: Any, cache: Cache, tokens_B: Array, positions_B: Array
) -> tuple[Array, Cache]:
    """Run the token at one position of each row; all earlier positions have been run.

    Returns:
      float32 logits [B, V] of what follows, and the cache with the tokens added. Donate the cache:
      it is then changed in place.
    """
    B = len(tokens_B)
    slots = cache.keys_LBSKH.shape[2]
    rows = jnp.arange(B)
    seen_BTS = jnp.arange(slots)[None, None] <= positions_B[:, None, None]
    batch = {
        "tokens": tokens_B[:, None],
        "is_visual": jnp.zeros((B, 1), bool),
        "is_newline": jnp.zeros((B, 1), bool),
        "visual": jnp.zeros((B, 1, module.size.width), module.dtype),
        "positions": positions_B[:, None],
        "segment_ids": jnp.ones((B, 1), jnp.int32),
    }

    # The cache is carried, not scanned over: so a layer writes one slot and copies nothing.
    def layer(
        carry: tuple[Array, Cache], xs: tuple[Array, Any]
    ) -> tuple[tuple[Array, Cache], None]:
        (x, held), (i, p) = carry, xs
        after: list[Cache] = []

        def attend(q: Array, k: Array, v: Array, ids: Array, *, causal: bool) -> Array:
            keys, values = (
                a.at[i, rows, positions_B].set(new[:, 0])
                for a, new in zip(held, (k, v), strict=True)
            )
            after.append(Cache(keys, values))
            return masked_attention(q, keys[i], values[i], seen_BTS)

        return (module.layer(p, x, batch, attend), after[0]), None

    x_BTD = module.entry(params["entry"], batch)
    layers = (jnp.arange(module.n_layers), _layers(params))
    (x_BTD, cache), _ = jax.lax.scan(layer, (x_BTD, cache), layers)
    return module.logits(params["exit"], x_BTD, params["entry"])[:, 0], cache


def _layers(params: Any) -> Any:
    """What each layer gets, stacked: its parameters and, where the model has one, its adapter."""
    adapter = {"adapter": params["adapter"]} if "adapter" in params else {}
    return {**params["layers"], **adapter}
