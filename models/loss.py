"""Next-token cross-entropy that never holds all logits at once.

The reported loss is the plain one; the gradient may include extra loss terms. Both are computed in
the same visit of a chunk of tokens, so no logits are computed twice. Matrix products take operands
in the hidden states' dtype and sum in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
Sums = dict[str, Array]
Chunk = tuple[Array, Array, Array]  # hidden states, targets, weights of some tokens
Dtypes = tuple[Any, Any]  # of hidden states and of the table
_Settings = tuple[int, "Objective", float]  # tokens of a chunk, the objective, the logits' cap
Visit = Callable[[Any, Chunk], tuple[Any, tuple[Array, ...]]]
TOKEN_MULTIPLE = 128  # chunks are a multiple of this, which fills matrix units


@dataclass(frozen=True)
class Objective:
    """Loss terms besides a token's negative log-likelihood: `z_loss` times the square of its
    log-sum-exp (arXiv 2204.02311); `label_smoothing` is the share of its target that is spread
    evenly over the vocabulary."""

    z_loss: float = 0.0
    label_smoothing: float = 0.0


NLL_ONLY = Objective()

_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def head_logits(x: Array, table: Array, cap: float = 0.0) -> Array:
    """Return logits float32 [..., vocab] of hidden states [..., width] and a table [vocab, width];
    a `cap` other than 0 bounds them smoothly (cap x tanh(logits / cap), arXiv 2408.00118)."""
    logits = _product("...d,vd->...v", x, table.astype(x.dtype))
    return cap * jnp.tanh(logits / cap) if cap else logits


def cross_entropy(
    x: Array,
    table: Array,
    targets: Array,
    weights: Array,
    *,
    logits_elements: int,
    objective: Objective = NLL_ONLY,
    cap: float = 0.0,
) -> Sums:
    """Return sums of weighted negative log-likelihood and of weighted correct predictions.

    The gradient of the first is that of `objective`. The table's gradient is summed over all tokens
    in float32.

    Args:
      x: hidden states [tokens, width].
      table: head [vocab, width].
      targets: int [tokens]; any value where the weight is 0.
      weights: float32 [tokens].
      logits_elements: limit of logits (tokens x vocab) in memory; at least one token's are held.
      cap: see `head_logits`.

    Returns:
      {"loss_sum", "correct"}: float32 scalars.
    """
    chunk = max(1, logits_elements // table.shape[0])
    if chunk > TOKEN_MULTIPLE:
        chunk -= chunk % TOKEN_MULTIPLE
    settings = chunk, objective, cap
    return _cross_entropy(settings, (x.dtype, table.dtype), x, table, targets, weights)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(
    settings: _Settings, dtypes: Dtypes, x: Array, table: Array, targets: Array, weights: Array
) -> Sums:
    head = table.astype(x.dtype)

    def visit(_: None, token_chunk: Chunk) -> tuple[None, tuple[Array, Array]]:
        logits = head_logits(token_chunk[0], head, settings[2])
        return None, _token_losses(logits, *_log_sum_and_likeliest(logits), token_chunk[1])

    _, (nll, correct) = _over_chunks(visit, None, (x, targets, weights), settings[0])
    return _sums(nll, correct, weights)


def _forward_with_gradient(
    settings: _Settings, dtypes: Dtypes, x: Array, table: Array, targets: Array, weights: Array
) -> tuple[Sums, tuple[Array, ...]]:
    """Return the sums, and gradients of the objective and of "correct" by their inputs."""
    chunk, objective, cap = settings
    head = table.astype(x.dtype)

    def visit(dtable: Array, token_chunk: Chunk) -> tuple[Array, tuple[Array, ...]]:
        x, targets, weights = token_chunk
        logits = head_logits(x, head, cap)
        total, likeliest = _log_sum_and_likeliest(logits)
        dlogits = _logit_gradient(objective, logits, total, targets)
        if cap:
            dlogits = dlogits * (1.0 - (logits / cap) ** 2)
        dlogits = (weights[:, None] * dlogits).astype(x.dtype)
        dx = _product("tv,vd->td", dlogits, head)
        dtable = dtable + _product("tv,td->vd", dlogits, x)
        nll, hit = _token_losses(logits, total, likeliest, targets)
        return dtable, (nll, hit, _token_objective(objective, logits, total, nll), dx)

    start = jnp.zeros_like(table, jnp.float32)
    dtable, tokens = _over_chunks(visit, start, (x, targets, weights), chunk)
    nll, correct, objective_value, dx = tokens
    return _sums(nll, correct, weights), (dx, dtable, objective_value, correct)


def _pull_back(
    _: _Settings, dtypes: Dtypes, gradients: tuple[Array, ...], dsums: Sums
) -> tuple[Array | None, ...]:
    dx, dtable, objective_value, correct = gradients
    scale = dsums["loss_sum"]
    dweights = scale * objective_value + dsums["correct"] * correct
    return (scale * dx).astype(dtypes[0]), (scale * dtable).astype(dtypes[1]), None, dweights


_cross_entropy.defvjp(_forward_with_gradient, _pull_back)


def _logit_gradient(objective: Objective, logits: Array, total: Array, targets: Array) -> Array:
    """Return the objective's gradient by the logits, for each token."""
    likely, smooth = jnp.exp(logits - total[:, None]), objective.label_smoothing
    if objective.z_loss:
        likely = likely * (1.0 + 2.0 * objective.z_loss * total)[:, None]
    if not smooth:
        return likely - _at_target(logits, targets)
    return likely - (1.0 - smooth) * _at_target(logits, targets) - smooth / logits.shape[1]


def _token_objective(objective: Objective, logits: Array, total: Array, nll: Array) -> Array:
    """Return the objective of each token."""
    value, smooth = nll, objective.label_smoothing
    if smooth:
        value = (1.0 - smooth) * nll + smooth * (total - jnp.mean(logits, axis=-1))
    return value + objective.z_loss * total**2 if objective.z_loss else value


def _over_chunks(
    visit: Visit, carry: Any, tokens: Chunk, chunk: int
) -> tuple[Any, tuple[Array, ...]]:
    """Run `lax.scan` over token chunks, the last one shorter; `visit` returns an entry per
    token."""
    n = tokens[0].shape[0]
    n_whole = n // chunk
    cut = n_whole * chunk
    outputs = []
    if n_whole:
        whole = jax.tree.map(lambda a: a[:cut].reshape(n_whole, chunk, *a.shape[1:]), tokens)
        carry, stacked = jax.lax.scan(visit, carry, whole)
        outputs.append(jax.tree.map(lambda a: a.reshape(cut, *a.shape[2:]), stacked))
    if cut < n or not n:
        carry, rest = visit(carry, jax.tree.map(lambda a: a[cut:], tokens))
        outputs.append(rest)
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)


def _at_target(logits: Array, targets: Array) -> Array:
    """Return 1 at each token's target, else 0. Unlike a gather, the comparison stays local if the
    vocabulary is sharded, and allows targets outside of the vocabulary (unsupervised)."""
    ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 1)
    return (ids == targets[:, None]).astype(logits.dtype)


def _log_sum_and_likeliest(logits: Array) -> tuple[Array, Array]:
    """Return each token's logarithm of the sum of exponentials and its first largest logit, in one
    pass over the logits (arXiv 1805.02867)."""

    def merge(a: Chunk, b: Chunk) -> Chunk:
        peak = jnp.maximum(a[0], b[0])
        total = a[1] * jnp.exp(a[0] - peak) + b[1] * jnp.exp(b[0] - peak)
        is_first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[2] < b[2]))
        return peak, total, jnp.where(is_first, a[2], b[2])

    words = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    start = jnp.finfo(logits.dtype).min, jnp.zeros((), logits.dtype), jnp.int32(logits.shape[1])
    of_each = logits, jnp.ones_like(logits), words
    peak, total, likeliest = jax.lax.reduce(of_each, start, merge, (1,))
    return peak + jnp.log(total), likeliest


def _token_losses(
    logits: Array, total: Array, likeliest: Array, targets: Array
) -> tuple[Array, Array]:
    """Return (negative log-likelihood, 1 if the target is the likeliest) from logits and their
    log-sum."""
    target_logit = jnp.sum(_at_target(logits, targets) * logits, axis=-1)
    hit = likeliest.astype(targets.dtype) == targets
    return total - target_logit, hit.astype(logits.dtype)


def _sums(nll: Array, correct: Array, weights: Array) -> Sums:
    return {"loss_sum": jnp.sum(weights * nll), "correct": jnp.sum(weights * correct)}
