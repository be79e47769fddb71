"""The learning rate's schedule and the optimizer, from the training configuration."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dflop_jax.config import TrainConfig

# Parameters of these names are vectors in spirit (even when stacked): weight decay leaves them out.
UNDECAYED = frozenset({"bias", "scale"})


def warmup_steps(config: TrainConfig) -> int:
    """Steps before the one that has the peak rate; the last step at most is that."""
    share = math.ceil(round(config.warmup_ratio * config.steps, 6))
    return min(share or config.warmup_steps, config.steps - 1)


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Linear warm-up (step 0 trains already), then `train.schedule`, which comes to
    `final_lr_fraction` of the peak when all steps are done."""
    peak, warmup = config.learning_rate, warmup_steps(config)
    final, n_left = config.final_lr_fraction, config.steps - warmup
    start = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    if config.schedule == "constant":
        rest: optax.Schedule = optax.constant_schedule(peak)
    elif config.schedule == "linear":
        rest = optax.linear_schedule(peak, peak * final, n_left)
    elif config.schedule == "cosine":
        rest = optax.cosine_decay_schedule(peak, n_left, alpha=final)
    else:
        n_down = min(config.decay_steps or math.ceil(config.steps / 10), n_left)
        rest = optax.linear_schedule(peak, peak * final, n_down, transition_begin=n_left - n_down)
    return optax.join_schedules([start, rest], [warmup]) if warmup else rest


def learning_rates(config: TrainConfig) -> np.ndarray:
    """The learning rate of every step, on the host."""
    # optax relies on implicit promotion, which the user may have forbidden.
    with jax.numpy_dtype_promotion("standard"):
        rates = jax.jit(learning_rate(config))(np.arange(config.steps))
    return np.broadcast_to(np.asarray(rates, np.float32), config.steps)


def decays(params: Any) -> Any:
    """Tree of booleans: whether weight decay applies to a parameter."""

    def one(path: Any, leaf: Any) -> bool:
        last = path[-1]
        name = str(getattr(last, "key", getattr(last, "name", last)))
        return leaf.ndim > 1 and name not in UNDECAYED

    return jax.tree.map_with_path(one, params)


def with_moments(tx: optax.GradientTransformation, dtype: Any) -> optax.GradientTransformation:
    """A transformation whose state is begun with its floats in a dtype; it computes in float32 and
    gives the state that dtype again."""

    def cast(state: Any, like: Any) -> Any:
        return jax.tree.map(lambda a, b: a.astype(b.dtype), state, like)

    def init(params: Any) -> Any:
        state = tx.init(params)
        return jax.tree.map(
            lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, state
        )

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        whole = jax.tree.map(
            lambda a: a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a, state
        )
        updates, new = tx.update(grads, whole, params)
        return updates, cast(new, state)

    return optax.GradientTransformation(init, update)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW; clipping by the global norm is the runtime's, since the norm spans submeshes."""
    scale = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps)
    return optax.chain(
        with_moments(scale, jnp.dtype(config.moments_dtype)),
        optax.add_decayed_weights(config.weight_decay, decays),
        optax.scale_by_learning_rate(learning_rate(config)),
    )
