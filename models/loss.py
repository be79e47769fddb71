"""Next-token cross-entropy that never holds all logits at once."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

Array = jax.Array


def head_logits(x: Array, table: Array) -> Array:
    """Logits float32 [..., vocab] of hidden states [..., width] against a table [vocab, width]."""
    return jnp.einsum("...d,vd->...v", x, table.astype(x.dtype), preferred_element_type=jnp.float32)


def _chunk_sums(table: Array, x: Array, targets: Array, weights: Array) -> tuple[Array, Array]:
    logits = head_logits(x, table)
    # A comparison instead of a gather: it stays local when the vocabulary is sharded, and a target
    # outside of the vocabulary (unsupervised) is harmless.
    ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 1)
    target_logit = jnp.sum(jnp.where(ids == targets[:, None], logits, 0.0), axis=-1)
    nll = jax.nn.logsumexp(logits, axis=-1) - target_logit
    hit = jnp.argmax(logits, axis=-1).astype(targets.dtype) == targets
    return jnp.sum(weights * nll), jnp.sum(weights * hit.astype(weights.dtype))


def cross_entropy(
    x: Array, table: Array, targets: Array, weights: Array, *, logits_elements: int
) -> dict[str, Array]:
    """Sums of weighted negative log-likelihood and of weighted correct predictions.

    Tokens go through the head in chunks of at most `logits_elements` logits; a chunk's logits are
    recomputed in the backward pass.

    Args:
      x: hidden states [tokens, width].
      table: head [vocab, width].
      targets: int [tokens]; where the weight is 0 any value will do.
      weights: float32 [tokens].
      logits_elements: most logits (tokens x vocab) alive at once; at least one token is taken.

    Returns:
      {"loss_sum", "correct"}: float32 scalars.
    """
    n_tokens, chunk = x.shape[0], max(1, logits_elements // table.shape[0])
    table = table.astype(x.dtype)
    if n_tokens <= chunk:
        loss, correct = _chunk_sums(table, x, targets, weights)
        return {"loss_sum": loss, "correct": correct}
    sums = functools.partial(jax.checkpoint(_chunk_sums, prevent_cse=False), table)
    n_whole = n_tokens // chunk
    cut = n_whole * chunk
    chunks = jax.tree.map(
        lambda a: a[:cut].reshape(n_whole, chunk, *a.shape[1:]), (x, targets, weights)
    )
    # The sums leave the scan as outputs, not as a carry: a carry made here would not vary over
    # the manual mesh axes of a surrounding shard_map.
    _, (losses, corrects) = jax.lax.scan(lambda _, c: (None, sums(*c)), None, chunks)
    loss, correct = jnp.sum(losses), jnp.sum(corrects)
    if cut < n_tokens:
        rest_loss, rest_correct = sums(x[cut:], targets[cut:], weights[cut:])
        loss, correct = loss + rest_loss, correct + rest_correct
    return {"loss_sum": loss, "correct": correct}
