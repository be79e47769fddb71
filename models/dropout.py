"""Dropout of training, independent of the plan. A mask depends only on a token's number (the field
"seeds" of the contract), the layer, a name and the index among the token's values. So it is the
same in any packing and when it is recomputed. Tokens of number 0, as in evaluation and padding,
have no dropout."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from zlib import crc32

import jax
import jax.numpy as jnp

Array = jax.Array


@dataclass(frozen=True)
class InputDropout:
    """Dropout of an adapter's input: `rate` of the values are dropped, by the numbers `seeds` of
    the part's tokens [rows, tokens] or pieces [rows]; `layer` is the layer's number, None outside
    of layers."""

    rate: float
    part: str
    seeds: Array
    layer: Array | None

    def drop(self, x: Array, name: str) -> Array:
        """Return the adapter's input from x [rows, tokens, *in], for the matrix of a name."""
        tokens, shape = self._token_numbers(x.shape[1]), x.shape[2:]
        number = jnp.uint32(crc32(f"{self.part}.{name}".encode()))
        if self.layer is not None:
            number = _mix_bits(number + self.layer.astype(jnp.uint32) * jnp.uint32(_GOLDEN_STEP))
        value_steps = jnp.arange(prod(shape), dtype=jnp.uint32).reshape(shape) * jnp.uint32(
            _GOLDEN_STEP
        )
        value_axes = tuple(range(2, x.ndim))
        token_bits = jnp.expand_dims(_mix_bits(tokens ^ number[None, None]), value_axes)
        bits = _mix_bits(token_bits + value_steps[None, None])
        is_training = jnp.expand_dims(tokens > 0, value_axes)
        is_kept = bits >= jnp.uint32(int(self.rate * 2**32))
        scaled = jnp.where(is_training, x * (1.0 / (1.0 - self.rate)), x)
        return jnp.where(is_training & ~is_kept, jnp.zeros_like(x), scaled)

    def _token_numbers(self, tokens: int) -> Array:
        """Return a number for each token of a row. If neighbouring tokens were merged, `seeds` has
        more tokens than the row; the first one's number counts."""
        if self.seeds.ndim == 1:
            value_steps = jnp.arange(1, tokens + 1, dtype=jnp.uint32) * jnp.uint32(_GOLDEN_STEP)
            token_bits = _mix_bits(self.seeds[:, None] + value_steps[None]) | jnp.uint32(1)
            return jnp.where(self.seeds[:, None] > 0, token_bits, jnp.zeros_like(token_bits))
        joined = self.seeds.shape[1] // tokens
        return self.seeds[:, : tokens * joined : joined]


_GOLDEN_STEP = 0x9E3779B9  # 2^32 over the golden ratio: its multiples are spread evenly


def _mix_bits(x: Array) -> Array:
    """Return uint32 numbers whose bits depend on all bits of x: MurmurHash3's last step."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    return x ^ (x >> jnp.uint32(16))
