"""The learning rate's values and which parameters decay."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dflop_jax.config import TrainConfig
from dflop_jax.train.optimizer import decays, learning_rate, make_optimizer


def rates(**changes):
    config = TrainConfig(**({"learning_rate": 2e-3, "final_lr_fraction": 0.1} | changes))
    return np.array([float(learning_rate(config)(i)) for i in range(config.steps + 1)])


def by_hand(steps, warmup, peak=2e-3, final=0.1):
    """Steps 0..steps: up in equal parts to the peak at `warmup`, then half a cosine."""
    out = []
    for i in range(steps + 1):
        if i < warmup:
            low = peak / (warmup + 1)
            out.append(low + (peak - low) * i / warmup)
        else:
            part = (i - warmup) / (steps - warmup)
            out.append(peak * (final + (1 - final) * (1 + math.cos(math.pi * part)) / 2))
    return np.array(out)


@pytest.mark.parametrize("steps, warmup", [(100, 10), (20, 0), (2, 1), (11, 10), (1, 0)])
def test_schedule_equals_the_formula(steps, warmup):
    got = rates(steps=steps, warmup_steps=warmup)
    np.testing.assert_allclose(got, by_hand(steps, warmup), rtol=1e-5)
    assert got.argmax() == warmup
    assert got[warmup] == pytest.approx(2e-3)
    assert got[-1] == pytest.approx(2e-4)
    assert got[0] > 0  # the first step learns


@pytest.mark.parametrize("steps, warmup", [(1, 10), (5, 5), (5, 500)])
def test_a_warmup_longer_than_the_run_ends_at_its_last_step(steps, warmup):
    got = rates(steps=steps, warmup_steps=warmup)
    np.testing.assert_allclose(got, by_hand(steps, steps - 1), rtol=1e-5)
    assert np.isfinite(got).all()
    assert got[steps - 1] == pytest.approx(2e-3)


@pytest.mark.parametrize("factor", [0.002, 1.0, 30.0])
def test_a_part_with_a_rate_of_its_own_follows_the_same_schedule(factor):
    """What lets one optimizer serve all parts, its steps multiplied."""
    want = rates(steps=30, warmup_steps=4, learning_rate=2e-3 * factor)
    np.testing.assert_allclose(factor * rates(steps=30, warmup_steps=4), want, rtol=1e-6)


def test_no_decay_to_a_constant():
    assert rates(steps=9, warmup_steps=3, final_lr_fraction=1.0)[3:] == pytest.approx(2e-3)
    assert rates(steps=9, warmup_steps=3, final_lr_fraction=0.0)[-1] == 0.0


TREE = {
    "dense": {"kernel": jnp.ones((4, 3, 3)), "bias": jnp.ones((4, 3))},
    "norm": {"scale": jnp.ones((4, 3))},
    "embedding": jnp.ones((5, 3)),
    "vector": jnp.ones(3),
}


def test_matrices_decay_and_vectors_do_not():
    assert decays(TREE) == {
        "dense": {"kernel": True, "bias": False},
        "norm": {"scale": False},
        "embedding": True,
        "vector": False,
    }
    assert decays({}) == {}


def test_adamw_by_hand():
    """Two steps of decoupled weight decay (Loshchilov & Hutter), element by element."""
    config = TrainConfig(
        steps=10, warmup_steps=0, learning_rate=0.1, weight_decay=0.5, beta2=0.9, clip_norm=0.01
    )
    tx = make_optimizer(config)
    grads = [jax.tree.map(lambda a, k=k: jnp.full_like(a, k), TREE) for k in (3.0, -1.0)]
    params = TREE
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state = tx.init(params)
        for g in grads:
            updates, state = tx.update(g, state, params)
            params = optax.apply_updates(params, updates)

    def hand(decay):
        p, m, v = 1.0, 0.0, 0.0
        for t, g in enumerate((3.0, -1.0), 1):
            m, v = 0.9 * m + 0.1 * g, 0.9 * v + 0.1 * g * g
            step = (m / (1 - 0.9**t)) / (math.sqrt(v / (1 - 0.9**t)) + 1e-8)
            p -= float(learning_rate(config)(t - 1)) * (step + decay * p)
        return p

    # Clipping is not the optimizer's: the gradient's norm is far above clip_norm here.
    np.testing.assert_allclose(params["embedding"], hand(0.5), rtol=1e-5)
    np.testing.assert_allclose(params["dense"]["kernel"], hand(0.5), rtol=1e-5)
    for vector in (params["dense"]["bias"], params["norm"]["scale"], params["vector"]):
        np.testing.assert_allclose(vector, hand(0.0), rtol=1e-5)
