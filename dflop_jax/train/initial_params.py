"""Parameters that a run begins with (published weights, or those of another run, of the whole model
or of its parts), and what `dflop export` writes of its checkpoint: parameters with adapters folded
in, or adapters alone, and the files beside them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from dflop_jax.checkpoint.state_arrays import parameter_arrays, read_array
from dflop_jax.checkpoint.store import (
    CheckpointReader,
    CheckpointStore,
    CorruptCheckpoint,
    OtherVersion,
    StorageError,
)
from dflop_jax.config import Config
from dflop_jax.config_fields import RATES, named_numbers
from dflop_jax.contract import MultimodalModel, Params, fold_adapters
from dflop_jax.report.run_folder import CHECKPOINTS
from dflop_jax.runtime.layout import trained_groups
from dflop_jax.runtime.module_parts import module_structs
from dflop_jax.runtime.parameter_layout import initial_structs
from dflop_jax.runtime.segment import Segment
from dflop_jax.train.load_params import apply_lazily, open_params
from dflop_jax.train.optimizer import LORA, find_trained_parts
from dflop_jax.train.run_dir import read_run_config
from dflop_jax.weights import Folder, ModuleParams, read_segment
from dflop_jax.weights.adapter import adapted_tensors

log = logging.getLogger("dflop_jax")
# (segment, its fresh parameters if they are asked for) -> parameters to begin with
Initializer = Callable[[Segment, Callable[[], Params]], Params]


def make_initializer(model: MultimodalModel, weights: Sequence[str]) -> Initializer | None:
    """Return how to begin with the checkpoints of `weights`, checked to fit; None for none.

    Args:
      weights: one folder of transformers for the whole model, or MODULE=FOLDER for some modules;
        what these leave out (a connector) begins fresh. A run's folder, or FOLDER@STEP, stands for
        the parameters in its newest checkpoint, or that one.

    Raises:
      ValueError: a folder that does not hold this model (or this module), or a model or module
        without published weights.
    """
    if not weights:
        return None
    by_module: dict[str, Initializer] = {}
    for item in weights:
        module, path, run, step = parse_weights(item)
        if run:
            by_module[module] = partial(
                read_segment_params, _open_checkpoint_of_run(path, run, step)
            )
            continue
        if not Path(path).is_dir():
            raise ValueError(
                f"model.weights={path}: no such folder of weights or run; name one, or train it "
                "first"
            )
        folder = Folder(path, find_weight_map(model, module, len(weights) == 1))
        folder.check()
        by_module[module] = partial(read_segment, folder)

    def initialize(segment: Segment, init_fresh: Callable[[], Params]) -> Params:
        read_params = by_module.get("") or by_module.get(segment.plan.module)
        return init_fresh() if read_params is None else read_params(segment, init_fresh)

    return initialize


def find_published_folders(weights: Sequence[str]) -> dict[str, str]:
    """The published folders that a run with these `model.weights` began with, by module ("": the
    whole model); of one that began with another run's parameters, those of that run."""
    folders: dict[str, str] = {}
    for module, path, run, _ in map(parse_weights, weights):
        if not run:
            folders[module] = path
            continue
        base_folders = find_published_folders(read_run_config(run).model.weights)
        folders |= (
            base_folders
            if not module
            else {module: base_folders.get(module) or base_folders.get("", "")}
        )
    return {module: path for module, path in folders.items() if path}


def parse_weights(item: str) -> tuple[str, str, str, str]:
    """The module of an item of `model.weights` ("": the whole model), its path, and the folder and
    the step ("": the newest) of the run whose checkpoint the path means ("": it means none)."""
    module, _, path = item.rpartition("=")
    run, step = path, ""
    if "@" in path and not Path(path).exists():
        run, _, step = path.rpartition("@")
    return module, path, run if Path(run, CHECKPOINTS).is_dir() else "", step


def _open_checkpoint_of_run(path: str, run: str, step: str) -> CheckpointReader:
    if step and not step.isdecimal():
        raise ValueError(f"model.weights={path}: {step!r} is no step; give RUN@STEP, or RUN")
    try:
        return open_checkpoint(Path(run, CHECKPOINTS), int(step) if step else None)
    except (CorruptCheckpoint, OtherVersion, StorageError) as e:
        raise ValueError(f"model.weights={path}: {e}; give RUN@STEP of another one") from None


def open_checkpoint(checkpoints: Path, step: int | None) -> CheckpointReader:
    """The checkpoint of a step, the newest for None.

    Raises:
      ValueError: it is not there.
      CorruptCheckpoint, StorageError, OtherVersion: it cannot be read.
    """
    store = CheckpointStore(checkpoints)
    steps = store.steps()
    if not steps or (step is not None and step not in steps):
        raise ValueError(store.describe_missing_step(step, steps))
    return store.open(steps[0] if step is None else step)


def read_segment_params(
    reader: CheckpointReader, segment: Segment, init_fresh: Callable[[], Params]
) -> Params:
    """A segment's parameters from a checkpoint of a run of the same model under any plan. Parts of
    which it has nothing (adapters that the run had not) are fresh.

    Raises:
      ValueError: it has nothing of the module, parts that the module has not, or other shapes.
    """
    module, checkpoint_name = segment.plan.module, f"the checkpoint of step {reader.step}"
    stored_parts = {
        _part_name(name) for name in reader.specs if name.startswith(f"params/{module}/")
    }
    if not stored_parts:
        raise ValueError(
            f"{checkpoint_name} has no parameters of {module}: it is of another model, name a run "
            "of this one"
        )
    if unexpected_parts := sorted(stored_parts - set(segment.module.inputs)):
        raise ValueError(
            f"{checkpoint_name} has {', '.join(unexpected_parts)} of {module}, which this model "
            "has not (adapters need train.lora_rank; or begin with an export, which merges them)"
        )
    leaves: list[Any] = []
    fresh_leaves: list[Any] = []
    for a in parameter_arrays(segment.name, segment):
        if _part_name(a.name) not in stored_parts:
            fresh_leaves = fresh_leaves or jax.tree.leaves(init_fresh())
            leaves.append(fresh_leaves[a.leaf])
            continue
        spec = reader.specs.get(a.name)
        if spec is None or spec.shape != a.shape:
            stored_shape = list(spec.shape) if spec else "nothing"
            raise ValueError(
                f"{checkpoint_name} has {stored_shape} as {a.name}, this model needs "
                f"{list(a.shape)}: it is of another model, name a run of this one"
            )
        leaves.append(read_array(reader, a))
    return jax.tree.unflatten(jax.tree.structure(initial_structs(segment)), leaves)


def _part_name(array_name: str) -> str:
    """The part of a module that a parameter is in, by the name of its array."""
    return array_name.split("/")[2]


def find_weight_map(model: MultimodalModel, module: str, is_only_item: bool) -> Any:
    """Return where a checkpoint has the parameters of a module, or ("") of the whole model."""
    if not module:
        if not is_only_item:
            raise ValueError(
                "model.weights: give one folder of the whole model, or MODULE=FOLDER each"
            )
        model_map = getattr(model, "weights", None)
        if model_map is None:
            raise ValueError(
                "model.weights: this model has no published form; give MODULE=FOLDER for its parts"
            )
        return model_map
    module_maps = getattr(model, "part_weights", {})
    if module not in module_maps:
        module_names = ", ".join(module_maps) or "none"
        raise ValueError(
            f"model.weights: no published weights of {module!r}; known: {module_names}"
        )
    return module_maps[module]()


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
        frozen = find_trained_parts(config.train, model).frozen
    if other_groups := [name for name in groups if name != LORA and name not in frozen]:
        raise ValueError(
            f"the run also trains {', '.join(other_groups)}, which adapters do not hold; "
            "leave out --adapter, or train under train.stage=full without rates of theirs"
        )
    if base_run := _find_trained_base(config.model.weights):
        raise ValueError(
            f"the run began with what {base_run} trained, which adapters do not hold; leave "
            f"out --adapter, or give an export of {base_run} as --weights"
        )


def _find_trained_base(weights: Sequence[str]) -> str:
    """The run, among those whose parameters are `model.weights`, that trained more than adapters;
    "" for none."""
    for _, _, run, _ in map(parse_weights, weights):
        if not run:
            continue
        config = read_run_config(run)
        rates = named_numbers(config.train.learning_rates, RATES)
        if not config.train.lora_rank or config.train.stage != "full" or {*rates} - {LORA}:
            return run
        if base_run := _find_trained_base(config.model.weights):
            return base_run
    return ""


def warn_unexportable_adapters(config: Config, model: Any) -> None:
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


def find_tokenizer_folders(config: Config) -> list[Path]:
    """Folders with tokenizer, template and processors of a run: the data's first, then those of the
    weights, the last module's before the others'."""
    weight_folders = [
        Path(folder) for folder in find_published_folders(config.model.weights).values()
    ]
    tokenizer = Path(config.data.tokenizer) if config.data.tokenizer else None
    folders = [tokenizer, *reversed(weight_folders), Path(config.model.size)]
    return [folder for folder in folders if folder is not None and folder.is_dir()]


def read_merged_params(
    reader: CheckpointReader, model: Any, *, average: bool
) -> list[ModuleParams]:
    """A checkpoint's parameters without adapters, which are folded in; all of it when it is asked
    for.

    Raises:
      ValueError: see `open_params`.
    """
    return [
        ModuleParams(name, fold_adapters(model.modules[name], params, apply_lazily))
        for name, params in open_params(reader, model, average=average).items()
    ]
