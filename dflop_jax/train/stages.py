"""What of a model trains, and how fast: stages, frozen parts, LoRA, a learning rate for each part.

Parts are named by the freeze groups of the model's modules ("connector", "lora", ...).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dflop_jax.config import TrainConfig
from dflop_jax.config_fields import DECAYS, RATES, adapter_ranks, named_numbers
from dflop_jax.contract import MultimodalModel, adapter_of
from dflop_jax.data.media.medium import TEXT_MODULE
from dflop_jax.runtime.layout import trained_groups

ADAPTER_FIELDS = ("lora_targets", "lora_ranks", "lora_dropout", "lora_alpha")
LORA = "lora"  # the freeze group of a model's adapters


@dataclass(frozen=True)
class TrainedParts:
    """Freeze groups that do not train, and the peak learning rate of each that does."""

    frozen: tuple[str, ...]
    rates: Mapping[str, float]


def configure_model(model: MultimodalModel, config: TrainConfig) -> MultimodalModel:
    """The model with LoRA, and trained on more than the plain loss, as the configuration asks.

    Raises:
      ValueError: the model does not know how.
    """
    if config.z_loss or config.label_smoothing:
        flags = f"train.z_loss={config.z_loss}, train.label_smoothing={config.label_smoothing}"
        method = _require_method(model, "with_objective(z_loss, label_smoothing)", flags)
        model = method(config.z_loss, config.label_smoothing)
    if config.lora_rank:
        flags = f"train.lora_rank={config.lora_rank}"
        method = _require_method(model, "with_lora(rank, alpha)", flags)
        model = method(
            config.lora_rank,
            config.lora_alpha,
            targets=config.lora_targets or (TEXT_MODULE,),
            ranks=adapter_ranks(config.lora_ranks),
            dropout=config.lora_dropout,
        )
    elif set_fields := [n for n in ADAPTER_FIELDS if getattr(config, n) != getattr(TrainConfig, n)]:
        raise ValueError(
            f"train.{set_fields[0]} is about adapters, which train.lora_rank=0 turns off; set a "
            f"rank, or leave {set_fields[0]} out"
        )
    return model


def _require_method(
    model: MultimodalModel, signature: str, flags: str
) -> Callable[..., MultimodalModel]:
    method = getattr(model, signature.partition("(")[0], None)
    if method is None:
        raise ValueError(
            f"{flags}, but a {type(model).__name__} has no {signature}; leave it out, or give the "
            "model one"
        )
    return method


def find_trained_parts(config: TrainConfig, model: MultimodalModel) -> TrainedParts:
    """What trains of a model after `configure_model`: with LoRA the adapters, and under the stage
    `full` the parts that `train.learning_rates` names.

    Raises:
      ValueError: a part that the model does not have, choices that contradict each other, or
        nothing left to train.
    """
    all_groups, stage = trained_groups(model, ()), f"train.stage={config.stage}"
    trained_groups(model, config.freeze)  # whether the names are right
    selected = _groups_of_stage(config.stage, model, all_groups)
    rates = named_numbers(config.learning_rates, RATES)
    if LORA in all_groups:
        adapted_groups = _adapted_groups(model)
        if frozen := sorted(adapted_groups - selected):
            raise ValueError(
                f"train.lora_targets adapts {', '.join(map(repr, frozen))}, which {stage} freezes; "
                "set train.lora_rank=0, choose the stage full, or leave them out of "
                "train.lora_targets"
            )
        if config.stage == "full":  # beside adapters, parts with a rate of their own
            selected &= set(rates)
        selected = (selected - adapted_groups) | {LORA}
    required = selected if config.stage != "full" else selected & {LORA}
    for name in sorted(required & set(config.freeze)):
        flag = "train.lora_rank" if name == LORA else stage
        raise ValueError(f"train.freeze names {name!r}, which {flag} trains; drop one of the two")
    trained = [g for g in all_groups if g in selected and g not in config.freeze]
    for field, names in ((RATES, rates), (DECAYS, named_numbers(config.weight_decays, DECAYS))):
        for name in names:
            if name not in trained:
                problem = (
                    "which is frozen" if name in all_groups else "which the model does not have"
                )
                raise ValueError(
                    f"train.{field} names {name!r}, {problem}; what trains is {', '.join(trained)}"
                )
    return TrainedParts(
        tuple(g for g in all_groups if g not in trained),
        {g: rates.get(g, config.learning_rate) for g in trained},
    )


def _adapted_groups(model: MultimodalModel) -> set[str]:
    """Freeze groups of which a part has adapters: what they adapt stays fixed, and so the rest."""
    groups_by_module = [m.freeze_groups for m in model.modules.values()]
    return {
        g for groups in groups_by_module for part, g in groups.items() if adapter_of(part) in groups
    }


def _groups_of_stage(stage: str, model: MultimodalModel, all_groups: tuple[str, ...]) -> set[str]:
    """Groups that a stage trains."""
    if stage == "full":
        return set(all_groups)
    if stage == TEXT_MODULE:
        return set(model.modules[TEXT_MODULE].freeze_groups.values())
    if "connector" not in all_groups:
        raise ValueError(
            f"train.stage=connector, but the model has no part of that name, only "
            f"{', '.join(all_groups)}; freeze what shall not train by train.freeze"
        )
    return {"connector"}
