"""The learning rate's schedule and the optimizer, from the training configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dflop_jax.config import TrainConfig
from dflop_jax.config_fields import DECAYS, named_numbers
from dflop_jax.contract import last_key
from dflop_jax.runtime.update import EmaOptimizer, Optimizer, map_optimizer_state

# Parameters of these names are vectors in spirit (even when stacked): weight decay leaves them out.
UNDECAYED = frozenset({"bias", "scale"})


def warmup_steps(config: TrainConfig) -> int:
    """Steps before the one that has the peak rate; the last step at most is that."""
    n_steps = math.ceil(round(config.warmup_ratio * config.steps, 6))
    return min(n_steps or config.warmup_steps, config.steps - 1)


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


def make_decay_mask(params: Any, undecayed: frozenset[str] = frozenset()) -> Any:
    """Tree of booleans: whether weight decay applies to a parameter.

    Args:
      undecayed: names of the model's own that it leaves out.
    """

    def is_decayed(path: Any, leaf: Any) -> bool:
        return leaf.ndim > 1 and last_key(path) not in UNDECAYED | undecayed

    return jax.tree.map_with_path(is_decayed, params)


def add_weight_decay(
    default: float, by_group: Mapping[str, float]
) -> optax.GradientTransformationExtraArgs:
    """Add what decays of the parameters to their steps: `by_group` of those in a freeze group that
    it names, `default` of all others. `groups`, if given, says the group of each part, and trees
    are by parts; see `make_decay_mask` for `undecayed`."""

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        groups: Any = None,
        undecayed: frozenset[str] = frozenset(),
        **_: Any,
    ) -> tuple[Any, Any]:
        def add_decay_to_part(decay: float, mask: Any, updates: Any, params: Any) -> Any:
            return jax.tree.map(
                lambda yes, u, p: u + decay * p if yes else u, mask, updates, params
            )

        decay_by_part: Any = default
        if groups is not None:
            decay_by_part = {part: by_group.get(groups[part], default) for part in updates}
        return jax.tree.map(
            add_decay_to_part, decay_by_part, make_decay_mask(params, undecayed), updates, params
        ), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def with_moments_dtype(
    tx: optax.GradientTransformation, dtype: Any
) -> optax.GradientTransformation:
    """A transformation that keeps its moments in a dtype between steps, and computes in float32."""

    def cast(state: Any, params: Any, dtype: Any) -> Any:
        moments = partial(jax.tree.map, lambda a: a.astype(dtype))
        return map_optimizer_state(moments, lambda a: a, state, params)

    def init(params: Any) -> Any:
        return cast(tx.init(params), params, dtype)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        updates, new = tx.update(grads, cast(state, grads, jnp.float32), params)
        return updates, cast(new, grads, dtype)

    return optax.GradientTransformation(init, update)


def make_optimizer(config: TrainConfig) -> Optimizer:
    """What `train.optimizer` names, with an average of the parameters if `train.ema` says so;
    clipping by the global norm is the runtime's, since the norm spans submeshes."""
    betas = {"b1": config.beta1, "b2": config.beta2}
    if config.optimizer == "lion":
        scale = optax.scale_by_lion(**betas)
    else:
        scale = optax.scale_by_adam(**betas, eps=config.eps)
    optimizer = optax.chain(
        with_moments_dtype(scale, jnp.dtype(config.moments_dtype)),
        add_weight_decay(config.weight_decay, named_numbers(config.weight_decays, DECAYS)),
        optax.scale_by_learning_rate(learning_rate(config)),
    )
    return EmaOptimizer(optimizer, config.ema) if config.ema else optimizer
