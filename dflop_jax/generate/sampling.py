"""Which token follows, given the logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dflop_jax.contract import Array


@dataclass(frozen=True)
class Sampling:
    """How an answer is drawn, and its most tokens. Temperature 0 takes the likeliest token."""

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max-tokens={self.max_tokens} must be at least 1")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature={self.temperature} must be 0 (the likeliest token) or a finite number"
                " above"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p={self.top_p} must be above 0 and at most 1 (all tokens)")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be from 0 to {2**32 - 1}")


def choose(logits: Array, key: Array, temperature: Array, top_p: Array) -> Array:
    """int32 [rows]: the token that follows in each row.

    Args:
      logits: float32 [rows, vocab].
      key: used where the temperature is above 0.
      temperature: scalar; 0 takes the likeliest token.
      top_p: scalar; tokens are drawn among the likeliest whose shares reach it, at least one.
    """
    likeliest = jnp.argmax(logits, axis=-1)
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    ranked = -jnp.sort(-scaled, axis=-1)
    shares = jax.nn.softmax(ranked, axis=-1)
    likely = jnp.cumsum(shares, axis=-1) - shares < top_p  # what the likelier ones leave to reach
    least = jnp.min(jnp.where(likely, ranked, jnp.inf), axis=-1, keepdims=True)
    drawn = jax.random.categorical(key, jnp.where(scaled >= least, scaled, -jnp.inf), axis=-1)
    return jnp.where(temperature > 0, drawn, likeliest).astype(jnp.int32)
