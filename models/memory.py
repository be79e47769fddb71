"""What a layer keeps of its rows' tokens so far, so that one more token of each runs alone.

Shape suffixes: L layers, B rows, T tokens, S slots, N query heads, K kv heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models.attention import Attend, masked_attention

Array = jax.Array


class KeptSlots(NamedTuple):
    """Keys and values; those of one layer lack the L."""

    keys_LBSKH: Any
    values_LBSKH: Any


@dataclass(frozen=True)
class KeysAndValues:
    """The memory of attention, see `dflop_jax.generate.contract.Memory`: keys and values of a
    row's tokens, of the last `window` of them where that is not 0.

    Token t of a row lies in slot t modulo the number of slots. So what pads a prompt is overwritten
    by the answer, and a window's slots go round.
    """

    attend: Attend
    window: int = 0
    axes = KeptSlots(("rows", None, "kv_heads", None), ("rows", None, "kv_heads", None))

    def prompt(
        self, last_B: Array, slots: int, q: Array, k: Array, v: Array, ids: Array, **how: Any
    ) -> tuple[Array, KeptSlots]:
        """Attention over whole prompts, and the keys and values of one layer."""
        out = self.attend(q, k, v, ids, **how)
        size = self._size(slots)
        if size == slots:
            return out, _padded(KeptSlots(k, v), 1, slots)
        token_BS = jnp.maximum(_token_of(jnp.arange(size), last_B, size), 0)[:, :, None, None]
        return out, KeptSlots(*(jnp.take_along_axis(a, token_BS, axis=1) for a in (k, v)))

    def token(
        self,
        kept: KeptSlots,
        layer: Array,
        at_B: Array,
        q: Array,
        k: Array,
        v: Array,
        ids: Array,
        **how: Any,
    ) -> tuple[Array, KeptSlots]:
        """Attention of the token at one place of each row, in the layer of that number."""
        size, rows = kept.keys_LBSKH.shape[2], jnp.arange(len(at_B))
        # One slot is written: no other layer's keys move.
        kept = KeptSlots(
            *(
                a.at[layer, rows, at_B % size].set(new[:, 0])
                for a, new in zip(kept, (k, v), strict=True)
            )
        )
        seen_BTS = (_token_of(jnp.arange(size), at_B, size) >= 0)[:, None]
        keys, values = (a[layer] for a in kept)
        return masked_attention(q, keys, values, seen_BTS, how.get("scale")), kept

    def grown(self, kept: KeptSlots, slots: int) -> KeptSlots:
        """The same with more slots; no row has more tokens than it had."""
        return _padded(kept, 2, self._size(slots))

    def _size(self, slots: int) -> int:
        return min(self.window or slots, slots)


def _token_of(slot_S: Array, last_B: Array, size: int) -> Array:
    """[B, S]: the last of a row's tokens up to number `last` that lies in a slot; below 0: none."""
    return last_B[:, None] - (last_B[:, None] - slot_S[None]) % size


def _padded(kept: KeptSlots, dim: int, size: int) -> KeptSlots:
    def padded(a: Array) -> Array:
        assert a.shape[dim] <= size, (a.shape, size)
        return jnp.pad(a, [(0, (size - n) * (d == dim)) for d, n in enumerate(a.shape)])

    return KeptSlots(*map(padded, kept))
