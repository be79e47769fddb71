"""Decoding one token at a time: a cache of keys and values in static shapes.

`prefill` runs the prompts, padded to one length, and keeps their keys and values; `decode` adds one
token to each row. Slot s of a row's cache is the row's token s, so what pads a prompt is
overwritten by the answer, and a token sees the slots up to its own.

Shape suffixes: L layers, B rows, T tokens, S slots, N query heads, K kv heads, H head dim, V vocab.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models.attention import masked_attention

Array = jax.Array
Decoder = Any  # a `models.decoder.DecoderModule`, whose methods call these functions


class Cache(NamedTuple):
    """Keys and values of the tokens so far, and what to add to a further token's place in its row
    for its position: not 0 where a picture takes fewer or more positions than tokens."""

    keys_LBSKH: Array
    values_LBSKH: Array
    ahead_B: Array


def prefill(
    module: Decoder, params: Any, batch: Mapping[str, Array], last_B: Array, slots: int
) -> tuple[Array, Cache]:
    """Run one prompt per row.

    Args:
      params: all of the decoder's, layers stacked.
      batch: fields of its entry, layers and inlets, [B, T]; positions count from 0 from the first
        token on.
      last_B: int, index of each prompt's last token; what follows it is padding.
      slots: size of the cache, at least T: positions that prompt and answer may take.

    Returns:
      float32 logits [B, V] of what follows the prompts, and the cache.
    """

    def layer(x: Array, p: Any) -> tuple[Array, tuple[Array, Array]]:
        seen: list[tuple[Array, Array]] = []

        def attend(q: Array, k: Array, v: Array, ids: Array, *, causal: bool) -> Array:
            seen.append((k, v))
            return module.attend(q, k, v, ids, causal=causal)

        return module.layer(p, x, batch, attend), seen[0]

    x_BTD, layers = module.entry(params["entry"], batch), _layers(params)
    held, done = [], 0
    for stop in sorted({*module.inlets.values(), module.n_layers}):
        part = jax.tree.map(lambda a, lo=done, hi=stop: a[lo:hi], layers)
        x_BTD, keys_and_values = jax.lax.scan(layer, x_BTD, part)
        held.append(keys_and_values)
        done = stop
        for name in (name for name, n in module.inlets.items() if n == stop):
            x_BTD = module.inlet(name, x_BTD, batch[name], batch)
    B, T, _ = x_BTD.shape
    free = slots - T
    assert free >= 0, (slots, x_BTD.shape)
    room = ((0, 0), (0, 0), (0, free), (0, 0), (0, 0))
    keys, values = (jnp.pad(jnp.concatenate(a), room) for a in zip(*held, strict=True))
    known_BT1 = (jnp.arange(T)[None] <= last_B[:, None])[:, :, None]
    positions_BTA = batch["positions"].reshape(B, T, -1)
    ahead_B = jnp.where(known_BT1, positions_BTA, 0).max(axis=(1, 2)) - last_B
    last_B1D = jnp.take_along_axis(x_BTD, last_B[:, None, None], axis=1)
    logits = module.logits(params["exit"], last_B1D, params["entry"])[:, 0]
    return logits, Cache(keys, values, ahead_B)


def decode(
    module: Decoder, params: Any, cache: Cache, tokens_B: Array, positions_B: Array
) -> tuple[Array, Cache]:
    """Run the token at one place of each row; all before it have been run.

    Returns:
      float32 logits [B, V] of what follows, and the cache with the tokens added. Donate the cache:
      it is then changed in place.
    """
    B = len(tokens_B)
    slots = cache.keys_LBSKH.shape[2]
    rows = jnp.arange(B)
    seen_BTS = jnp.arange(slots)[None, None] <= positions_B[:, None, None]
    spec = module.field_spec("positions", B, 1)
    now = (positions_B + cache.ahead_B).reshape(B, *[1] * (len(spec.shape) - 1))
    batch = {
        "tokens": tokens_B[:, None],
        "is_visual": jnp.zeros((B, 1), bool),
        "is_newline": jnp.zeros((B, 1), bool),
        "visual": jnp.zeros((B, 1, module.size.width), module.dtype),
        "positions": jnp.broadcast_to(now, spec.shape),
        "segment_ids": jnp.ones((B, 1), jnp.int32),
    }

    # The cache is carried, not scanned over: so a layer writes one slot and copies nothing.
    def layer(
        carry: tuple[Array, tuple[Array, Array]], xs: tuple[Array, Any]
    ) -> tuple[tuple[Array, tuple[Array, Array]], None]:
        (x, held), (i, p) = carry, xs
        after: list[tuple[Array, Array]] = []

        def attend(q: Array, k: Array, v: Array, ids: Array, *, causal: bool) -> Array:
            keys, values = (
                a.at[i, rows, positions_B].set(new[:, 0])
                for a, new in zip(held, (k, v), strict=True)
            )
            after.append((keys, values))
            return masked_attention(q, keys[i], values[i], seen_BTS)

        return (module.layer(p, x, batch, attend), after[0]), None

    x_BTD = module.entry(params["entry"], batch)
    layers = (jnp.arange(module.n_layers), _layers(params))
    held = cache.keys_LBSKH, cache.values_LBSKH
    (x_BTD, (keys, values)), _ = jax.lax.scan(layer, (x_BTD, held), layers)
    logits = module.logits(params["exit"], x_BTD, params["entry"])[:, 0]
    return logits, Cache(keys, values, cache.ahead_B)


def _layers(params: Any) -> Any:
    """What each layer gets, stacked: its parameters and, where the model has one, its adapter."""
    adapter = {"adapter": params["adapter"]} if "adapter" in params else {}
    return {**params["layers"], **adapter}
