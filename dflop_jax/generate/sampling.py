"""Sample the next token from logits, and decide when an answer ends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflop_jax.contract import Array


@dataclass(frozen=True)
class Sampling:
    """The options of sampling and of ending an answer."""

    max_tokens: int = 64
    temperature: float = 0.0  # 0: take the most probable token
    top_p: float = 1.0  # nucleus sampling, after `top_k`; 1: off
    seed: int = 0  # an answer depends on the seed and its number, not on the rest of its batch
    top_k: int = 0  # sample among this many most probable tokens; 0: among all
    stop: tuple[str, ...] = ()  # texts before which the answer ends
    # Logits of tokens in prompt or answer are divided by it if positive, multiplied if negative
    # (arXiv 1909.05858); 1: off.
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        checks = {
            f"max-tokens={self.max_tokens} must be at least 1": self.max_tokens >= 1,
            f"temperature={self.temperature} must be 0 (the most probable token) or a positive "
            "finite number": 0 <= self.temperature < math.inf,
            f"top-k={self.top_k} must be at least 0 (0: all tokens)": self.top_k >= 0,
            f"top-p={self.top_p} must be above 0 and at most 1 (all tokens)": 0 < self.top_p <= 1,
            f"seed={self.seed} must be from 0 to {2**32 - 1}": 0 <= self.seed < 2**32,
            "a stop text is empty; give --stop TEXT": "" not in self.stop,
            f"repetition-penalty={self.repetition_penalty} must be a finite number above 0 "
            "(1: off)": 0 < self.repetition_penalty < math.inf,
        }
        for message, is_valid in checks.items():
            if not is_valid:
                raise ValueError(message)

    def cut_at_stop(self, text: str) -> str | None:
        """Return the text before the first stop text; None if it contains no stop text."""
        stop_indices = [k for k in (text.find(stop) for stop in self.stop) if k >= 0]
        return text[: min(stop_indices)] if stop_indices else None


class SamplingArgs(NamedTuple):
    """`Sampling` as scalar arguments of programs, so that new values do not recompile."""

    seed: Any
    temperature: Any
    top_p: Any
    top_k: Any
    penalty: Any

    @classmethod
    def from_sampling(cls, sampling: Sampling) -> SamplingArgs:
        shares = sampling.temperature, sampling.top_p, sampling.repetition_penalty
        temperature, top_p, penalty = np.array(shares, np.float32)
        return cls(np.uint32(sampling.seed), temperature, top_p, np.int32(sampling.top_k), penalty)


def sample_tokens(
    args: SamplingArgs, logits_BV: Array, present_BV: Array, number_B: Array, nth_B: Array
) -> Array:
    """Sample the next token of each row, int32 [B].

    Args:
      present_BV: bool, whether the token is in the prompt or the answer.
      number_B: uint32, the answer's number, which seeds its sampling.
      nth_B: int32, number of tokens in the answer so far.
    """
    penalized = jnp.where(logits_BV > 0, logits_BV / args.penalty, logits_BV * args.penalty)
    logits_BV = jnp.where(present_BV, penalized, logits_BV)

    def drawn() -> Array:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(args.seed), number_B)
        keys = jax.vmap(jax.random.fold_in)(keys, nth_B)
        choose = jax.vmap(_sample_token, (0, 0, None))
        return choose(logits_BV, keys, args).astype(jnp.int32)

    def likeliest() -> Array:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)

    return jax.lax.cond(args.temperature > 0, drawn, likeliest)


def _sample_token(logits_V: Array, key: Array, args: SamplingArgs) -> Array:
    """Sample a token after temperature, top-k and top-p."""
    n = len(logits_V)
    scaled = logits_V / jnp.where(args.temperature > 0, args.temperature, 1.0)
    ranked = -jnp.sort(-scaled)
    first = jnp.arange(n) < jnp.where(args.top_k > 0, args.top_k, n)
    probabilities = jax.nn.softmax(jnp.where(first, ranked, -jnp.inf))
    likely = first & (jnp.cumsum(probabilities) - probabilities < args.top_p)
    min_logit = jnp.min(jnp.where(likely, ranked, jnp.inf))
    return jax.random.categorical(key, jnp.where(scaled >= min_logit, scaled, -jnp.inf))
