"""The learning rate's values and which parameters decay."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dflop_jax.config import TrainConfig
from dflop_jax.runtime.update import EMA_KEY
from dflop_jax.train.optimizer import (
    learning_rate,
    make_decay_mask,
    make_optimizer,
)


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


def after_warmup(schedule, steps, warmup, decay_steps, final=0.1):
    """What `schedule` makes of the peak from step `warmup` on, as its definition says."""
    left = steps - warmup
    down = min(decay_steps or -(-steps // 10), left)
    for i in range(left + 1):
        if schedule == "constant":
            yield 1.0
        elif schedule == "linear":
            yield 1 - (1 - final) * i / left
        else:
            yield 1 - (1 - final) * max(0, i - (left - down)) / down


@pytest.mark.parametrize("schedule", ["constant", "linear", "wsd"])
@pytest.mark.parametrize(
    "steps, warmup, decay_steps", [(100, 10, 0), (100, 10, 25), (20, 0, 7), (5, 4, 3), (1, 0, 0)]
)
def test_other_schedules_equal_their_definitions(schedule, steps, warmup, decay_steps):
    got = rates(steps=steps, warmup_steps=warmup, schedule=schedule, decay_steps=decay_steps)
    want = np.array(list(after_warmup(schedule, steps, warmup, decay_steps)))
    np.testing.assert_allclose(got[warmup:], 2e-3 * want, rtol=1e-5)
    np.testing.assert_allclose(got[:warmup], by_hand(steps, warmup)[:warmup], rtol=1e-5)


TREE = {
    "dense": {"kernel": jnp.ones((4, 3, 3)), "bias": jnp.ones((4, 3))},
    "norm": {"scale": jnp.ones((4, 3))},
    "embedding": jnp.ones((5, 3)),
    "vector": jnp.ones(3),
}


def test_matrices_decay_and_vectors_do_not():
    assert make_decay_mask(TREE) == {
        "dense": {"kernel": True, "bias": False},
        "norm": {"scale": False},
        "embedding": True,
        "vector": False,
    }
    assert make_decay_mask({}) == {}


def test_adamw_by_hand():
    """Two steps of decoupled weight decay (Loshchilov & Hutter), element by element."""
    config = TrainConfig(
        steps=10, warmup_steps=0, learning_rate=0.1, weight_decay=0.5, beta1=0.8, beta2=0.9,
        eps=1e-3, clip_norm=0.01,
    )  # fmt: skip
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
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
            step = (m / (1 - 0.8**t)) / (math.sqrt(v / (1 - 0.9**t)) + 1e-3)
            p -= float(learning_rate(config)(t - 1)) * (step + decay * p)
        return p

    # Clipping is not the optimizer's: the gradient's norm is far above clip_norm here.
    np.testing.assert_allclose(params["embedding"], hand(0.5), rtol=1e-5)
    np.testing.assert_allclose(params["dense"]["kernel"], hand(0.5), rtol=1e-5)
    for vector in (params["dense"]["bias"], params["norm"]["scale"], params["vector"]):
        np.testing.assert_allclose(vector, hand(0.0), rtol=1e-5)


def test_moments_in_bfloat16_are_rounded_between_steps_only():
    """Against AdamW by hand in float64, its moments rounded after every step."""
    config = TrainConfig(
        steps=10, warmup_steps=0, learning_rate=0.1, weight_decay=0.0, moments_dtype="bfloat16"
    )
    tx, rng = make_optimizer(config), np.random.default_rng(0)
    p = want = jnp.asarray(rng.normal(size=64), jnp.float32)
    m = v = np.zeros(64)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state = tx.init({"p": p})
        for t in range(1, 6):
            g = rng.normal(size=64).astype(np.float32)
            updates, state = tx.update({"p": jnp.asarray(g)}, state, {"p": p})
            p = optax.apply_updates(p, updates["p"])
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            step = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
            want = want - float(learning_rate(config)(t - 1)) * step
            m, v = (np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in (m, v))
    np.testing.assert_allclose(p, want, rtol=1e-5, atol=1e-5)
    assert {a.dtype.name for a in jax.tree.leaves(state[0])} == {"bfloat16", "int32"}


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_what_has_no_gradient_and_does_not_decay_keeps_its_bits(name):
    """Buffers: a layer's scalar, and bounds that bound nothing."""
    params = {"layer_scalar": jnp.array([[0.3], [0.7]]), "input_min": jnp.array([-jnp.inf, -1.0])}
    tx = make_optimizer(TrainConfig(optimizer=name, weight_decay=0.1, ema=0.9))
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        state, now = tx.init(params), params
        for _ in range(3):
            zeros = jax.tree.map(jnp.zeros_like, now)
            updates, state = tx.update(zeros, state, now, undecayed=frozenset(params))
            now = optax.apply_updates(now, updates)
    jax.tree.map(np.testing.assert_array_equal, now, params)
    jax.tree.map(np.testing.assert_array_equal, state[EMA_KEY], params)
