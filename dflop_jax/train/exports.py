"""What `dflop export` writes of a run's checkpoint: parameters with adapters folded in, or adapters
alone, and the files beside them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflop_jax.checkpoint.store import CheckpointReader
from dflop_jax.config import Config
from dflop_jax.config_fields import RATES, named_numbers
from dflop_jax.contract import MultimodalModel
from dflop_jax.pipeline.layout import trained_groups
from dflop_jax.pipeline.parts import module_structs
from dflop_jax.train.initial import first_weights, parse_weights
from dflop_jax.train.load_params import computed, saved_params
from dflop_jax.train.run_dir import run_config
from dflop_jax.train.stages import LORA, trained_parts
from dflop_jax.weights import ModuleParams
from dflop_jax.weights.adapter import adapted_tensors

log = logging.getLogger("dflop_jax")


def check_only_adapters(
    config: Config, model: MultimodalModel, frozen: Sequence[str] | None = None
) -> None:
    """Check that the adapters of a run, beside the published weights that it began with, are its
    model.

    Args:
      model: as it is trained.
      frozen: its parts that are frozen; None: those that the configuration freezes.

    Raises:
      ValueError: they are not.
    """
    groups = trained_groups(model, ())
    if LORA not in groups:
        raise ValueError(
            "the run has no adapters; train with train.lora_rank, or leave out --adapter"
        )
    if frozen is None:
        frozen = trained_parts(config.train, model).frozen
    if others := [name for name in groups if name != LORA and name not in frozen]:
        raise ValueError(
            f"the run also trains {', '.join(others)}, which adapters do not hold; "
            "leave out --adapter, or train under train.stage=full without rates of theirs"
        )
    if run := _trained_base(config.model.weights):
        raise ValueError(
            f"the run began with what {run} trained, which adapters do not hold; leave "
            f"out --adapter, or give an export of {run} as --weights"
        )


def _trained_base(weights: Sequence[str]) -> str:
    """The run, among those whose parameters are `model.weights`, that trained more than adapters;
    "" for none."""
    for _, _, run, _ in map(parse_weights, weights):
        if not run:
            continue
        before = run_config(run)
        rates = named_numbers(before.train.learning_rates, RATES)
        if not before.train.lora_rank or before.train.stage != "full" or {*rates} - {LORA}:
            return run
        if found := _trained_base(before.model.weights):
            return found
    return ""


def warn_of_adapters(config: Config, model: Any) -> None:
    """Say, before a run trains adapters, why they cannot be exported alone, if they cannot."""
    if not config.train.lora_rank:
        return
    try:
        check_only_adapters(config, model)
        if hasattr(model, "weights"):
            shapes = {name: module_structs(module) for name, module in model.modules.items()}
            adapted_tensors(model.weights, shapes)
    except ValueError as e:
        log.warning("dflop export --adapter will refuse this run: %s", e)


def beside(config: Config) -> list[Path]:
    """Folders with tokenizer, template and processors of a run: the data's first, then those of the
    weights, the last module's before the others'."""
    began = [Path(folder) for folder in first_weights(config.model.weights).values()]
    tokenizer = Path(config.data.tokenizer) if config.data.tokenizer else None
    folders = [tokenizer, *reversed(began), Path(config.model.size)]
    return [folder for folder in folders if folder is not None and folder.is_dir()]


def merged_params(reader: CheckpointReader, model: Any, *, average: bool) -> list[ModuleParams]:
    """A checkpoint's parameters without adapters, which are folded in; all of it when it is asked
    for.

    Raises:
      ValueError: see `saved_params`.
    """
    held = []
    for name, params in saved_params(reader, model, average=average).items():
        fold = getattr(model.modules[name], "merged", None)
        if fold is not None:
            params = fold(params, computed)
        held.append(ModuleParams(name, params))
    return held
