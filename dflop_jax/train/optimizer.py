"""The trained parts of a model (stages, frozen parts, LoRA), their learning rates, the optimizer.

Parts are named by the freeze groups of the model's modules ("connector", "lora", ...).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dflop_jax.config import TrainConfig
from dflop_jax.config_fields import DECAYS, RATES, parse_adapter_ranks, parse_numbers
from dflop_jax.contract import MultimodalModel, adapter_of, last_key
from dflop_jax.data.media.medium import TEXT_MODULE
from dflop_jax.runtime.layout import trained_groups
from dflop_jax.runtime.update import EmaOptimizer, Optimizer, map_optimizer_state

ADAPTER_FIELDS = ("lora_targets", "lora_ranks", "lora_dropout", "lora_alpha")
LORA = "lora"  # the freeze group of a model's adapters


@dataclass(frozen=True)
class TrainedParts:
    """Freeze groups that do not train, and the peak learning rate of each that does."""

    frozen: tuple[str, ...]
    rates: Mapping[str, float]


def configure_model(model: MultimodalModel, config: TrainConfig) -> MultimodalModel:
    """Return the model with the adapters and the loss terms of the configuration; ValueError if the
    model has no method for them."""
    if config.z_loss or config.label_smoothing:
        flags = f"train.z_loss={config.z_loss}, train.label_smoothing={config.label_smoothing}"
        method = require_method(model, "with_objective(z_loss, label_smoothing)", flags)
        model = method(config.z_loss, config.label_smoothing)
    if config.lora_rank:
        flags = f"train.lora_rank={config.lora_rank}"
        method = require_method(model, "with_lora(rank, alpha)", flags)
        model = method(
            config.lora_rank,
            config.lora_alpha,
            targets=config.lora_targets or (TEXT_MODULE,),
            ranks=parse_adapter_ranks(config.lora_ranks),
            dropout=config.lora_dropout,
        )
    elif set_fields := [n for n in ADAPTER_FIELDS if getattr(config, n) != getattr(TrainConfig, n)]:
        raise ValueError(
            f"train.{set_fields[0]} configures adapters, which train.lora_rank=0 turns off; set a "
            f"rank, or omit {set_fields[0]}"
        )
    return model


def require_method(
    model: MultimodalModel, signature: str, flags: str
) -> Callable[..., MultimodalModel]:
    method = getattr(model, signature.partition("(")[0], None)
    if method is None:
        raise ValueError(
            f"{flags}, but a {type(model).__name__} has no {signature}; omit it, or add one to the "
            "model"
        )
    return method


def find_trained_parts(config: TrainConfig, model: MultimodalModel) -> TrainedParts:
    """Return the trained parts of a model: with LoRA the adapters, and under the stage `full` also
    the parts in `train.learning_rates`. ValueError for contradictions and unknown parts."""
    all_groups, stage = trained_groups(model, ()), f"train.stage={config.stage}"
    trained_groups(model, config.freeze)  # raises for unknown names
    selected = _groups_of_stage(config.stage, model, all_groups)
    rates = parse_numbers(config.learning_rates, RATES)
    if LORA in all_groups:
        # The weights that adapters change stay fixed, like the rest of their group.
        adapted_groups = {
            group
            for groups in (m.freeze_groups for m in model.modules.values())
            for part, group in groups.items()
            if adapter_of(part) in groups
        }
        if frozen := sorted(adapted_groups - selected):
            raise ValueError(
                f"train.lora_targets adapts {', '.join(map(repr, frozen))}, which {stage} freezes; "
                "set train.lora_rank=0, use the stage full, or remove them from "
                "train.lora_targets"
            )
        if config.stage == "full":  # besides adapters, parts with their own learning rate
            selected &= set(rates)
        selected = (selected - adapted_groups) | {LORA}
    required = selected if config.stage != "full" else selected & {LORA}
    for name in sorted(required & set(config.freeze)):
        flag = "train.lora_rank" if name == LORA else stage
        raise ValueError(f"train.freeze names {name!r}, which {flag} trains; omit one of the two")
    trained = [g for g in all_groups if g in selected and g not in config.freeze]
    for field, names in ((RATES, rates), (DECAYS, parse_numbers(config.weight_decays, DECAYS))):
        for name in (n for n in names if n not in trained):
            problem = "is frozen" if name in all_groups else "the model does not have"
            raise ValueError(
                f"train.{field} names {name!r}, which {problem}; trained parts: "
                f"{', '.join(trained)}"
            )
    return TrainedParts(
        tuple(g for g in all_groups if g not in trained),
        {g: rates.get(g, config.learning_rate) for g in trained},
    )


def _groups_of_stage(stage: str, model: MultimodalModel, all_groups: tuple[str, ...]) -> set[str]:
    if stage == "full":
        return set(all_groups)
    if stage == TEXT_MODULE:
        return set(model.modules[TEXT_MODULE].freeze_groups.values())
    if "connector" not in all_groups:
        raise ValueError(
            f"train.stage=connector, but the model has no part of that name, only "
            f"{', '.join(all_groups)}; freeze the other parts by train.freeze"
        )
    return {"connector"}


# Names of parameters that act as vectors (even when stacked), without weight decay.
UNDECAYED = frozenset({"bias", "scale"})


def warmup_steps(config: TrainConfig) -> int:
    """Return the steps before the one with the peak rate, which is at most the last one."""
    n_steps = math.ceil(round(config.warmup_ratio * config.steps, 6))
    return min(n_steps or config.warmup_steps, config.steps - 1)


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Return the rate by step: a linear warm-up (the rate of step 0 is above 0), then
    `train.schedule` down to `final_lr_fraction` of the peak when all steps are done."""
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
    """Return the learning rate of every step, on the host."""
    # optax relies on implicit promotion, which the user may have forbidden.
    with jax.numpy_dtype_promotion("standard"):
        rates = jax.jit(learning_rate(config))(np.arange(config.steps))
    return np.broadcast_to(np.asarray(rates, np.float32), config.steps)


def make_decay_mask(params: Any, undecayed: frozenset[str] = frozenset()) -> Any:
    """Return a tree of booleans: whether weight decay applies to a parameter. It does not apply to
    vectors and to the model's `undecayed` names."""

    def is_decayed(path: Any, leaf: Any) -> bool:
        return leaf.ndim > 1 and last_key(path) not in UNDECAYED | undecayed

    return jax.tree.map_with_path(is_decayed, params)


def add_weight_decay(
    default: float, by_group: Mapping[str, float]
) -> optax.GradientTransformationExtraArgs:
    """Add weights times their decay to the updates: `by_group` has the decay of freeze groups,
    `default` is that of the others. An update takes the group of each part as `groups`."""

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
    """Store the moments in a dtype between steps, and compute in float32."""

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
    """Make the optimizer of `train.optimizer` and `train.ema`; the runtime clips gradients."""
    betas = {"b1": config.beta1, "b2": config.beta2}
    if config.optimizer == "lion":
        scale = optax.scale_by_lion(**betas)
    else:
        scale = optax.scale_by_adam(**betas, eps=config.eps)
    optimizer = optax.chain(
        with_moments_dtype(scale, jnp.dtype(config.moments_dtype)),
        add_weight_decay(config.weight_decay, parse_numbers(config.weight_decays, DECAYS)),
        optax.scale_by_learning_rate(learning_rate(config)),
    )
    return EmaOptimizer(optimizer, config.ema) if config.ema else optimizer
