"""Next-token cross-entropy that never holds all logits at once.

A gradient is computed in the same visit to a chunk of tokens as its loss, so no logits are computed
twice. Matrix products take operands of the hidden states' dtype and sum in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
Sums = dict[str, Array]
Chunk = tuple[Array, Array, Array]  # hidden states, targets, weights of some tokens
Dtypes = tuple[Any, Any]  # of hidden states and of the table
Visit = Callable[[Any, Chunk], tuple[Any, tuple[Array, ...]]]
MULTIPLE = 128  # of tokens in a chunk: matrix units are wasted on odd sizes

_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def head_logits(x: Array, table: Array) -> Array:
    """Logits float32 [..., vocab] of hidden states [..., width] against a table [vocab, width]."""
    return _product("...d,vd->...v", x, table.astype(x.dtype))


def cross_entropy(
    x: Array, table: Array, targets: Array, weights: Array, *, logits_elements: int
) -> Sums:
    """Sums of weighted negative log-likelihood and of weighted correct predictions.

    The table's gradient is summed over all tokens in float32.

    Args:
      x: hidden states [tokens, width].
      table: head [vocab, width].
      targets: int [tokens]; where the weight is 0 any value will do.
      weights: float32 [tokens].
      logits_elements: most logits (tokens x vocab) alive at once; at least one token is taken.

    Returns:
      {"loss_sum", "correct"}: float32 scalars.
    """
    chunk = max(1, logits_elements // table.shape[0])
    if chunk > MULTIPLE:
        chunk -= chunk % MULTIPLE
    return _cross_entropy(chunk, (x.dtype, table.dtype), x, table, targets, weights)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(
    chunk: int, dtypes: Dtypes, x: Array, table: Array, targets: Array, weights: Array
) -> Sums:
    head = table.astype(x.dtype)

    def visit(_: None, now: Chunk) -> tuple[None, tuple[Array, Array]]:
        logits = head_logits(now[0], head)
        return None, _token_losses(logits, jax.nn.logsumexp(logits, axis=-1), now[1])

    _, (nll, correct) = _over_chunks(visit, None, (x, targets, weights), chunk)
    return _sums(nll, correct, weights)


def _with_gradient(
    chunk: int, dtypes: Dtypes, x: Array, table: Array, targets: Array, weights: Array
) -> tuple[Sums, tuple[Array, ...]]:
    """The sums, and the gradients of "loss_sum" and "correct" by what they depend on."""
    head = table.astype(x.dtype)

    def visit(dtable: Array, now: Chunk) -> tuple[Array, tuple[Array, ...]]:
        x, targets, weights = now
        logits = head_logits(x, head)
        total = jax.nn.logsumexp(logits, axis=-1)
        dlogits = jnp.exp(logits - total[:, None]) - _at_target(logits, targets)
        dlogits = (weights[:, None] * dlogits).astype(x.dtype)
        dx = _product("tv,vd->td", dlogits, head)
        dtable = dtable + _product("tv,td->vd", dlogits, x)
        return dtable, (*_token_losses(logits, total, targets), dx)

    start = jnp.zeros_like(table, jnp.float32)
    dtable, (nll, correct, dx) = _over_chunks(visit, start, (x, targets, weights), chunk)
    return _sums(nll, correct, weights), (dx, dtable, nll, correct)


def _pull_back(
    _: int, dtypes: Dtypes, gradients: tuple[Array, ...], of_sums: Sums
) -> tuple[Array | None, ...]:
    dx, dtable, nll, correct = gradients
    scale = of_sums["loss_sum"]
    dweights = scale * nll + of_sums["correct"] * correct
    return (scale * dx).astype(dtypes[0]), (scale * dtable).astype(dtypes[1]), None, dweights


_cross_entropy.defvjp(_with_gradient, _pull_back)


def _over_chunks(
    visit: Visit, carry: Any, tokens: Chunk, chunk: int
) -> tuple[Any, tuple[Array, ...]]:
    """`lax.scan` over chunks of the tokens, the last one shorter if need be; `visit`'s outputs have
    an entry per token, and so have the results."""
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
    """1 at each token's target, else 0. A comparison instead of a gather: it stays local when the
    vocabulary is sharded, and a target outside of the vocabulary (unsupervised) is harmless."""
    ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 1)
    return (ids == targets[:, None]).astype(logits.dtype)


def _token_losses(logits: Array, total: Array, targets: Array) -> tuple[Array, Array]:
    """(negative log-likelihood, 1 where the target is the likeliest) of each token; `total` is the
    log of its sum of exponentials."""
    target_logit = jnp.sum(_at_target(logits, targets) * logits, axis=-1)
    hit = jnp.argmax(logits, axis=-1).astype(targets.dtype) == targets
    return total - target_logit, hit.astype(logits.dtype)


def _sums(nll: Array, correct: Array, weights: Array) -> Sums:
    return {"loss_sum": jnp.sum(weights * nll), "correct": jnp.sum(weights * correct)}
