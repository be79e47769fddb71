"""The head's one pass against plain gradients of the whole logits, in float32 and in bfloat16."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import loss
from models.loss import Objective, cross_entropy, head_logits

TOKENS, WIDTH, VOCAB, CHUNK = 1024, 64, 1500, 32


def problem(dtype=jnp.float32):
    """Hidden states and a table that bfloat16 holds exactly, targets, and which tokens count."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(TOKENS, WIDTH)), jnp.bfloat16)
    table = jnp.asarray(rng.normal(size=(VOCAB, WIDTH)) / np.sqrt(4 * WIDTH), jnp.bfloat16)
    targets = jnp.asarray(rng.integers(0, VOCAB, TOKENS), jnp.int32)
    weights = jnp.asarray(rng.random(TOKENS) < 0.7, jnp.float32)
    return x.astype(dtype), table.astype(jnp.float32), targets, weights


def whole(x, table, targets, weights):
    """The loss by its definition, all logits at once."""
    logits = jnp.einsum("td,vd->tv", x, table)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]
    return -jnp.sum(weights * picked)


def in_one_pass(x, table, targets, weights):
    sums = cross_entropy(x, table, targets, weights, logits_elements=CHUNK * VOCAB)
    return sums["loss_sum"]


def gradients(loss, *args, scale=0.37):
    """Of `scale` times the loss, by hidden states and table, as float64."""
    scaled = jax.jit(jax.grad(lambda x, t: scale * loss(x, t, *args[2:]), argnums=(0, 1)))
    return [np.float64(g.astype(jnp.float32)) for g in scaled(*args[:2])]


@pytest.mark.parametrize("cap, chunk", [(0.0, CHUNK), (2.0, 7), (0.0, 1), (0.0, 2 * TOKENS)])
@pytest.mark.parametrize("objective", [Objective(), Objective(1e-2), Objective(1e-3, 0.2)], ids=str)
def test_more_may_be_trained_on_than_is_reported(objective, cap, chunk):
    """Gradients, those by the weights too, against the whole objective by its definition; loss and
    hits are those of the plain loss, of logits that a cap bounds smoothly."""
    x, table, targets, weights = (a[:100] if len(a) == TOKENS else a for a in problem())
    weights, table, smooth = weights * 0.5, 3 * table, objective.label_smoothing

    def definition(x, table, weights, smooth=smooth, z_loss=objective.z_loss):
        logits = jnp.einsum("td,vd->tv", x, table)
        logits = cap * jnp.tanh(logits / cap) if cap else logits
        wanted = jax.nn.one_hot(targets, VOCAB) * (1 - smooth) + smooth / VOCAB
        z = z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
        return jnp.sum(weights * (z - jnp.sum(wanted * jax.nn.log_softmax(logits), axis=-1)))

    def sums(x, table, weights):
        how = {"logits_elements": chunk * VOCAB, "objective": objective, "cap": cap}
        return cross_entropy(x, table, targets, weights, **how)

    by = (0, 1, 2)
    want = jax.jit(jax.grad(definition, argnums=by))(x, table, weights)
    got = jax.jit(jax.grad(lambda *a: sums(*a)["loss_sum"], argnums=by))(x, table, weights)
    for g, w in zip(got, want, strict=True):
        assert error(g, w) < 1e-5
    reported = jax.jit(sums)(x, table, weights)["loss_sum"]
    np.testing.assert_allclose(reported, definition(x, table, weights, 0.0, 0.0), rtol=1e-5)
    assert not cap or np.abs(head_logits(x, table, cap)).max() <= cap


def error(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def test_the_tables_gradient_in_bfloat16_is_within_a_thousandth():
    """Of a model that knows little yet; the rounding of one that knows much is 1.5 thousandths."""
    want_dx, want = gradients(whole, *problem())
    dx, got = gradients(in_one_pass, *problem(jnp.bfloat16))
    assert error(got, want) < 1e-3
    assert error(dx, want_dx) < 3e-3


def lowered(wanted, dtype=jnp.bfloat16):
    """A program that gives the loss and its gradients by arguments `wanted`."""

    def program(*args):
        by = {"argnums": wanted}
        return jax.value_and_grad(in_one_pass, **by)(*args) if wanted else in_one_pass(*args)

    return jax.jit(program).lower(*problem(dtype))


def test_no_product_is_in_float32_and_none_is_computed_twice():
    """Every matrix product, those in loops once."""
    typed = r"stablehlo.dot_general.*: \(tensor<[\dx]*x(\w+)>, tensor<[\dx]*x(\w+)>\)"
    assert re.findall(typed, lowered((0, 1)).as_text()) == [("bf16", "bf16")] * 3


@pytest.mark.parametrize("wanted, n", [((0, 1), 3), ((0,), 2), ((1,), 2), ((), 1)])
def test_what_is_frozen_or_only_evaluated_costs_no_product(wanted, n):
    compiled = lowered(wanted, dtype=jnp.float32).compile().as_text()
    assert len(re.findall(r"= \S+ dot\(|\$matmul", compiled)) == n


def test_unsupervised_targets_may_lie_outside_of_the_vocabulary():
    x, table = jnp.ones((2, 3)), jnp.ones((4, 3))
    targets, weights = jnp.asarray([-100, 1], jnp.int32), jnp.asarray([0.0, 1.0])
    sums = cross_entropy(x, table, targets, weights, logits_elements=100)
    np.testing.assert_allclose(sums["loss_sum"], np.log(4), rtol=1e-6)


@pytest.mark.parametrize("words", [1, 2, 7, 1000])
@pytest.mark.parametrize("size", [0.0, 3.0, 1e4])
def test_log_sums_and_first_largest_logits(words, size):
    """Far apart, equal, and alone; against sums in float64."""
    logits = np.round(size * np.random.default_rng(words).standard_normal((5, words)), 1)
    logits = logits.astype(np.float32)
    logits[0] = logits[0, -1:]
    total, likeliest = jax.jit(loss._log_sum_and_likeliest)(logits)
    wide = logits.astype(np.float64)
    peak = wide.max(1, keepdims=True)
    want = peak[:, 0] + np.log(np.exp(wide - peak).sum(1))
    np.testing.assert_allclose(total, want, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(likeliest, logits.argmax(1))
