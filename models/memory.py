"""The memory of attention layers for decoding one more token per row.

Shape suffixes: L layers, B rows, T tokens, S slots, N query heads, K kv heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models.attention import AttentionFunction, masked_attention

Array = jax.Array


class KVCache(NamedTuple):
    """Keys and values; those of one layer lack the L."""

    keys_LBSKH: Any
    values_LBSKH: Any


@dataclass(frozen=True)
class KVMemory:
    """The memory of attention, see `dflop_jax.generate.decoding.Memory`: keys and values of a row's
    tokens, or of the last `window` of them if that is not 0.

    Token t of a row is in slot t modulo the number of slots. So the answer overwrites a prompt's
    padding, and a window reuses its slots.
    """

    attend: AttentionFunction
    window: int = 0
    axes = KVCache(("rows", None, "kv_heads", None), ("rows", None, "kv_heads", None))

    def prefill(
        self, last_B: Array, slots: int, q: Array, k: Array, v: Array, ids: Array, **mask_args: Any
    ) -> tuple[Array, KVCache]:
        """Attend over whole prompts; return the output, and the keys and values of one layer."""
        output = self.attend(q, k, v, ids, **mask_args)
        size = self._size(slots)
        if size == slots:
            return output, _pad_slots(KVCache(k, v), 1, slots)
        token_BS = jnp.maximum(_newest_token_in_slot(jnp.arange(size), last_B, size), 0)[
            :, :, None, None
        ]
        return output, KVCache(*(jnp.take_along_axis(a, token_BS, axis=1) for a in (k, v)))

    def decode_token(
        self,
        cache: KVCache,
        layer: Array,
        place_B: Array,
        q: Array,
        k: Array,
        v: Array,
        ids: Array,
        **mask_args: Any,
    ) -> tuple[Array, KVCache]:
        """Attend from the token at one position of each row, in layer number `layer`."""
        size, rows = cache.keys_LBSKH.shape[2], jnp.arange(len(place_B))
        # One slot is written: other layers' keys do not move.
        cache = KVCache(
            *(
                a.at[layer, rows, place_B % size].set(new[:, 0])
                for a, new in zip(cache, (k, v), strict=True)
            )
        )
        is_filled_BTS = (_newest_token_in_slot(jnp.arange(size), place_B, size) >= 0)[:, None]
        keys, values = (a[layer] for a in cache)
        return masked_attention(q, keys, values, is_filled_BTS, mask_args.get("scale")), cache

    def grow(self, cache: KVCache, slots: int) -> KVCache:
        """Return the cache with more slots; rows keep their tokens."""
        return _pad_slots(cache, 2, self._size(slots))

    def _size(self, slots: int) -> int:
        return min(self.window or slots, slots)


def _newest_token_in_slot(slot_S: Array, last_B: Array, size: int) -> Array:
    """Return [B, S]: the last of a row's tokens up to `last` in each slot; below 0: none."""
    return last_B[:, None] - (last_B[:, None] - slot_S[None]) % size


def _pad_slots(cache: KVCache, dim: int, size: int) -> KVCache:
    def padded(a: Array) -> Array:
        assert a.shape[dim] <= size, (a.shape, size)
        return jnp.pad(a, [(0, (size - n) * (d == dim)) for d, n in enumerate(a.shape)])

    return KVCache(*map(padded, cache))
