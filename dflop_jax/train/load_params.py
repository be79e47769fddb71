"""Reads the parameters of checkpoints, saved under any plan: to start a run from them, to generate
or to export, as lazy arrays or on devices; and adapters together with their base."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from dflop_jax.checkpoint.checkpointer import read_array
from dflop_jax.checkpoint.format import CorruptCheckpoint
from dflop_jax.checkpoint.store import CheckpointReader, CheckpointStore
from dflop_jax.config import Config
from dflop_jax.config_fields import RATES, parse_numbers
from dflop_jax.contract import MultimodalModel, Params, fold_adapters
from dflop_jax.report.run_folder import CHECKPOINTS, CONFIG
from dflop_jax.runtime.layout import trained_groups
from dflop_jax.runtime.module_parts import module_structs
from dflop_jax.runtime.parameter_layout import initial_structs
from dflop_jax.runtime.segment import Segment
from dflop_jax.runtime.state_arrays import parameter_arrays
from dflop_jax.runtime.update import EMA_KEY
from dflop_jax.train.optimizer import LORA
from dflop_jax.train.run_dir import read_run_config
from dflop_jax.weights import Folder, ModuleParams, read_segment
from dflop_jax.weights.adapter import adapted_tensors

log = logging.getLogger("dflop_jax.train")
T = TypeVar("T")
# (segment, function that makes its fresh parameters) -> initial parameters
Initializer = Callable[[Segment, Callable[[], Params]], Params]


@dataclass(frozen=True)
class LoadedParams:
    """Parameters of each module after `step` steps, layers stacked."""

    params: dict[str, Params]
    step: int
    folder: Path


def load_params(
    run: str | Path, model: MultimodalModel, placement: jax.Device | Mapping[str, Params]
) -> LoadedParams:
    """Load the parameters of a run with adapters merged, on one device as they were saved, or with
    the shapes, dtypes and shardings of each module; see `use_newest_checkpoint`."""

    def load(reader: CheckpointReader, folder: Path) -> LoadedParams:
        params = {}
        for name, lazy_params in open_params(reader, model).items():
            if isinstance(placement, Mapping):
                arrays = jax.tree.map(_make_device_array, placement[name], lazy_params)
            else:
                arrays = jax.device_put(jax.tree.map(np.asarray, lazy_params), placement)
            params[name] = fold_adapters(model.modules[name], arrays)
        return LoadedParams(params, reader.step, folder)

    return use_newest_checkpoint(run, load)


def use_newest_checkpoint(run: str | Path, read: Callable[[CheckpointReader, Path], T]) -> T:
    """Return the result of `read` for the newest complete checkpoint of a run folder, or for the
    given checkpoint folder. A damaged checkpoint is logged, and the previous one is used.

    Raises:
      ValueError: there is no such folder, or no (complete) checkpoint in it.
      StorageError, OtherVersion: it cannot be read.
    """
    store, steps = _find_checkpoints(Path(run))
    for step in steps:
        try:
            return read(store.open(step), store.folder(step))
        except CorruptCheckpoint as e:
            log.warning("checkpoint of step %d is damaged, using an older one: %s", step, e)
    raise ValueError(f"{run}: no checkpoint is complete; use another run, or train it again")


def _find_checkpoints(path: Path) -> tuple[CheckpointStore, tuple[int, ...]]:
    """Return the store that contains `path`, and the steps to try, newest first."""
    if path.name.isdigit() and (steps := CheckpointStore(path.parent).steps()):
        store, step = CheckpointStore(path.parent), int(path.name)
        if step not in steps:
            raise ValueError(store.describe_missing_step(step, steps))
        return store, (step,)
    if not path.is_dir():
        raise ValueError(f"{path}: no such run folder; check --checkpoint, or train it first")
    for root in (path / CHECKPOINTS, path):
        if steps := CheckpointStore(root).steps():
            return CheckpointStore(root), steps
    reason = "it is not a run folder"
    if (path / CONFIG).exists():
        reason = "the run has not saved one yet (see --checkpoint.every_s)"
    raise ValueError(f"{path}: no checkpoint in it; {reason}; name another")


def _make_device_array(struct: jax.ShapeDtypeStruct, array: LazyArray) -> jax.Array:
    @cache  # several devices may hold the same box
    def read_box(*bounds: tuple[int, int]) -> np.ndarray:
        return array[tuple(slice(*b) for b in bounds)].astype(struct.dtype, copy=False)

    def read_shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return read_box(*(s.indices(n)[:2] for s, n in zip(index, struct.shape, strict=True)))

    return jax.make_array_from_callback(struct.shape, struct.sharding, read_shard)


@dataclass(frozen=True, eq=False)
class LazyArray:
    """An array that is read when indexed: `array[row]` reads a row along the first dim,
    `array[slices]` a box, `np.asarray(array)` all."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[tuple[slice, ...]], np.ndarray]  # reads a box, by slices of its first dims

    def __getitem__(self, index: int | tuple[slice, ...]) -> np.ndarray:
        if isinstance(index, tuple):
            return self.read(index)
        return self.read((slice(index, index + 1),))[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = self.read(())
        return whole if dtype is None else whole.astype(dtype)


def open_params(
    reader: CheckpointReader, model: MultimodalModel, *, average: bool = False
) -> dict[str, Params]:
    """Return a checkpoint's parameters of each module as `LazyArray`s, layers stacked; `average`:
    the moving average of trained ones. ValueError if it is of another model or has no average."""
    if average and not any(f"/{EMA_KEY}/" in name for name in reader.specs):
        raise ValueError(f"{reader}: has no moving average; train with train.ema, or omit --ema")

    def open_array(module: str, path: Any, struct: jax.ShapeDtypeStruct) -> LazyArray:
        leaf_name, shape = jax.tree_util.keystr(path, simple=True, separator="/"), struct.shape
        name = f"params/{module}/{leaf_name}"
        average_name = f"opt_state/{module}/{EMA_KEY}/{leaf_name}"
        if average and average_name in reader.specs:
            name = average_name
        spec = reader.specs.get(name)
        if spec is None or spec.shape != shape:
            stored = f"{name} as {list(spec.shape)}" if spec else f"no {name}"
            raise ValueError(
                f"{reader}: has {stored}, the model needs {list(shape)}; give the experiment that "
                "it was trained with"
            )

        def read(index: tuple[slice, ...]) -> np.ndarray:
            full_dims = [slice(None)] * (len(shape) - len(index))
            bounds = [s.indices(n)[:2] for s, n in zip((*index, *full_dims), shape, strict=True)]
            return reader.read(name, [lo for lo, _ in bounds], [hi - lo for lo, hi in bounds])

        return LazyArray(shape, spec.numpy_dtype, read)

    return {
        name: jax.tree_util.tree_map_with_path(partial(open_array, name), module_structs(module))
        for name, module in model.modules.items()
    }


def apply_lazily(function: Callable[..., Any], *arrays: Any) -> LazyArray:
    """Apply a function to arrays, or to the rows that are read, on the host."""
    struct = jax.eval_shape(function, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays))

    def compute(index: tuple[slice, ...]) -> np.ndarray:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return np.asarray(function(*(np.asarray(a[index]) for a in arrays)))

    return LazyArray(struct.shape, struct.dtype, compute)


def make_initializer(model: MultimodalModel, weights: Sequence[str]) -> Initializer | None:
    """Return the function that reads a segment from `weights`, checked to fit, or None.

    Args:
      weights: one folder of transformers for the whole model, or MODULE=FOLDER for some modules;
        other modules (a connector) start with fresh parameters. A run's folder, or FOLDER@STEP,
        means the parameters in its newest checkpoint, or in that of STEP.

    Raises:
      ValueError: a folder does not have this model or module, or these have no published weights.
    """
    if not weights:
        return None
    by_module: dict[str, Initializer] = {}
    for item in weights:
        module, path, run, step = parse_weights(item)
        if run:
            by_module[module] = partial(read_segment_params, _open_run(path, run, step))
            continue
        if not Path(path).is_dir():
            raise ValueError(
                f"model.weights={path}: no such folder of weights or run; name one, or train it "
                "first"
            )
        if not module and len(weights) > 1:
            raise ValueError(
                "model.weights: give one folder of the whole model, or MODULE=FOLDER each"
            )
        folder = Folder(path, find_weight_map(model, module))
        folder.check()
        by_module[module] = partial(read_segment, folder)

    def initialize(segment: Segment, init_fresh: Callable[[], Params]) -> Params:
        read_params = by_module.get("") or by_module.get(segment.plan.module)
        return init_fresh() if read_params is None else read_params(segment, init_fresh)

    return initialize


def find_published_folders(weights: Sequence[str]) -> dict[str, str]:
    """Return the published folders of a run with these `model.weights`, by module ("": the whole
    model). If the run started from another run, return that run's folders."""
    folders: dict[str, str] = {}
    for module, path, run, _ in map(parse_weights, weights):
        if not run:
            folders[module] = path
            continue
        base_folders = find_published_folders(read_run_config(run).model.weights)
        if module:
            base_folders = {module: base_folders.get(module) or base_folders.get("", "")}
        folders |= base_folders
    return {module: path for module, path in folders.items() if path}


def parse_weights(item: str) -> tuple[str, str, str, str]:
    """Parse an item of `model.weights` into (its module, "" for the whole model; its path; the run
    folder that the path names, "" if none; that run's step, "" for the newest)."""
    module, _, path = item.rpartition("=")
    run, step = path, ""
    if "@" in path and not Path(path).exists():
        run, _, step = path.rpartition("@")
    return module, path, run if Path(run, CHECKPOINTS).is_dir() else "", step


def _open_run(path: str, run: str, step: str) -> CheckpointReader:
    if step and not step.isdecimal():
        raise ValueError(f"model.weights={path}: {step!r} is not a step; give RUN@STEP, or RUN")
    checkpoint = Path(run, CHECKPOINTS, f"{int(step):08d}") if step else run
    return use_newest_checkpoint(checkpoint, lambda reader, _: reader)


def read_segment_params(
    reader: CheckpointReader, segment: Segment, init_fresh: Callable[[], Params]
) -> Params:
    """Read a segment's parameters from a checkpoint of any plan; adapters that it lacks are fresh.
    ValueError if it is of another model."""
    module, checkpoint_name = segment.plan.module, f"the checkpoint of step {reader.step}"
    names = [name.split("/") for name in reader.specs]  # params/MODULE/PART/...
    stored_parts = {name[2] for name in names if name[:2] == ["params", module]}
    if not stored_parts:
        raise ValueError(
            f"{checkpoint_name} has no parameters of {module}; name a run of this model"
        )
    if unexpected_parts := sorted(stored_parts - set(segment.module.inputs)):
        raise ValueError(
            f"{checkpoint_name} has {', '.join(unexpected_parts)} of {module}, which this model "
            "lacks (adapters need train.lora_rank; or start from an export, which merges them)"
        )
    leaves: list[Any] = []
    fresh_leaves: list[Any] = []
    for a in parameter_arrays(segment.name, segment):
        if a.name.split("/")[2] not in stored_parts:
            fresh_leaves = fresh_leaves or jax.tree.leaves(init_fresh())
            leaves.append(fresh_leaves[a.leaf])
            continue
        spec = reader.specs.get(a.name)
        if spec is None or spec.shape != a.shape:
            stored_shape = list(spec.shape) if spec else "nothing"
            raise ValueError(
                f"{checkpoint_name} has {stored_shape} as {a.name}, this model needs "
                f"{list(a.shape)}; name a run of this model"
            )
        leaves.append(read_array(reader, a))
    return jax.tree.unflatten(jax.tree.structure(initial_structs(segment)), leaves)


def find_weight_map(model: MultimodalModel, module: str) -> Any:
    """Return where published weights have the parameters of a module, or of the whole model ("");
    ValueError if it has no published form."""
    if not module and hasattr(model, "weights"):
        return model.weights
    module_maps = getattr(model, "part_weights", {})
    if module not in module_maps:
        problem = f"no published weights of {module!r}"
        if not module:
            problem = "this model has no published form; name a module instead"
        raise ValueError(f"{problem}; known: {', '.join(module_maps) or 'none'}")
    return module_maps[module]()


def check_only_adapters(config: Config, model: MultimodalModel, frozen: Sequence[str]) -> None:
    """Raise ValueError unless adapters and published weights make up the run's whole model."""
    groups = trained_groups(model, ())
    if LORA not in groups:
        raise ValueError("the run has no adapters; train with train.lora_rank, or omit --adapter")
    if other_groups := [name for name in groups if name != LORA and name not in frozen]:
        raise ValueError(
            f"the run also trains {', '.join(other_groups)}, which adapters do not hold; "
            "omit --adapter, or use train.stage=full without learning rates for them"
        )
    if base_run := _find_trained_base(config.model.weights):
        raise ValueError(
            f"the run started from parameters of {base_run}, which adapters do not hold; "
            f"omit --adapter, or give an export of {base_run} as --weights"
        )


def warn_unexportable_adapters(config: Config, model: Any, frozen: Sequence[str]) -> None:
    """Warn, before a run trains adapters, if `dflop export --adapter` will refuse it."""
    if not config.train.lora_rank:
        return
    try:
        check_only_adapters(config, model, frozen)
        if hasattr(model, "weights"):
            shapes = {name: module_structs(module) for name, module in model.modules.items()}
            adapted_tensors(model.weights, shapes)
    except ValueError as e:
        log.warning("dflop export --adapter will refuse this run: %s", e)


def _find_trained_base(weights: Sequence[str]) -> str:
    """Return the run in `model.weights` that trained more than adapters; "" if there is none."""
    for _, _, run, _ in map(parse_weights, weights):
        if not run:
            continue
        config = read_run_config(run)
        rates = parse_numbers(config.train.learning_rates, RATES)
        if not config.train.lora_rank or config.train.stage != "full" or {*rates} - {LORA}:
            return run
        if base_run := _find_trained_base(config.model.weights):
            return base_run
    return ""


def find_tokenizer_folders(config: Config) -> list[Path]:
    """Return folders with tokenizer, template and processors: the data's, then the modules'."""
    weight_folders = find_published_folders(config.model.weights).values()
    names = [config.data.tokenizer, *reversed(weight_folders), config.model.size]
    return [Path(name) for name in names if name and Path(name).is_dir()]


def read_merged_params(
    reader: CheckpointReader, model: Any, *, average: bool
) -> list[ModuleParams]:
    """Return `open_params` with adapters merged when parameters are read."""
    return [
        ModuleParams(name, fold_adapters(model.modules[name], params, apply_lazily))
        for name, params in open_params(reader, model, average=average).items()
    ]
