"""AdamW with warm-up and cosine decay, from the training configuration."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

from dflop_jax.config import TrainConfig

# Parameters of these names are vectors in spirit (even when stacked): weight decay leaves them out.
UNDECAYED = frozenset({"bias", "scale"})


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Linear warm-up (step 0 trains already), then cosine to `final_lr_fraction` of the peak."""
    warmup = min(config.warmup_steps, max(config.steps - 1, 0))
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (warmup + 1),
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(config.steps, warmup + 1),
        end_value=config.learning_rate * config.final_lr_fraction,
    )


def learning_rates(config: TrainConfig) -> np.ndarray:
    """The learning rate of every step, on the host."""
    # optax relies on implicit promotion, which the user may have forbidden.
    with jax.numpy_dtype_promotion("standard"):
        return np.asarray(jax.jit(learning_rate(config))(np.arange(config.steps)))


def decays(params: Any) -> Any:
    """Tree of booleans: whether weight decay applies to a parameter."""

    def one(path: Any, leaf: Any) -> bool:
        last = path[-1]
        name = str(getattr(last, "key", getattr(last, "name", last)))
        return leaf.ndim > 1 and name not in UNDECAYED

    return jax.tree.map_with_path(one, params)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW; clipping by the global norm is the runtime's, since the norm spans submeshes."""
    return optax.adamw(
        learning_rate(config),
        b1=0.9,
        b2=config.beta2,
        weight_decay=config.weight_decay,
        mask=decays,
    )
