"""The parameters of a checkpoint, whatever plan it was saved under, laid out as is asked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from dflop_jax.checkpoint.store import CheckpointReader, CheckpointStore, CorruptCheckpoint
from dflop_jax.contract import Module, MultimodalModel, Params, folded
from dflop_jax.pipeline.parts import init_structs, module_structs
from dflop_jax.pipeline.update import AVERAGE
from dflop_jax.report.run_folder import CHECKPOINTS, CONFIG

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """Parameters of each module after `step` steps, layers stacked."""

    params: dict[str, Params]
    step: int
    folder: Path


def load_params(
    run: str | Path,
    model: MultimodalModel,
    where: jax.Device | Mapping[str, Params],
) -> Loaded:
    """Return those of the newest whole checkpoint of a run folder, or of the checkpoint folder
    given, adapters folded into what they adapt.

    Args:
      where: one device, on which they then lie whole and as they were saved, or by module the
        shapes, dtypes and shardings of its parts.

    Raises:
      ValueError: it is of another model; see `of_newest`.
      StorageError: it cannot be read.
    """

    def load(reader: CheckpointReader, folder: Path) -> Loaded:
        params = {
            name: _read_module(
                reader,
                name,
                module_structs(module, init_structs, jax.sharding.SingleDeviceSharding(where))
                if isinstance(where, jax.Device)
                else where[name],
                as_saved=isinstance(where, jax.Device),
            )
            for name, module in model.modules.items()
        }
        merged = {name: folded(m, params[name]) for name, m in model.modules.items()}
        return Loaded(merged, reader.step, folder)

    return of_newest(run, load)


def of_newest(run: str | Path, use: Callable[[CheckpointReader, Path], T]) -> T:
    """What a function gives for the newest whole checkpoint of a run folder, or for the checkpoint
    folder given, and its place. One that turns out damaged is named in the log and the one before
    it is taken.

    Raises:
      ValueError: no such folder, or no (whole) checkpoint in it.
      StorageError, OtherVersion: it cannot be read.
    """
    store, steps = _find(Path(run))
    for step in steps:
        try:
            return use(store.open(step), store.folder(step))
        except CorruptCheckpoint as e:
            log.warning("checkpoint of step %d is damaged, using an older one: %s", step, e)
    raise ValueError(f"{run}: no checkpoint is whole; take another run, or train it again")


def _find(path: Path) -> tuple[CheckpointStore, tuple[int, ...]]:
    """Return the store that `path` is or lies in, and the steps to try, newest first."""
    if not path.is_dir():
        raise ValueError(f"{path}: no such run folder; check --checkpoint, or train it first")
    if path.name.isdigit():
        one, step = CheckpointStore(path.parent), int(path.name)
        if step in one.steps():
            return one, (step,)
    for root in (path / CHECKPOINTS, path):
        if steps := CheckpointStore(root).steps():
            return CheckpointStore(root), steps
    why = "it is no run folder"
    if (path / CONFIG).exists():
        why = "the run has saved none yet (see --checkpoint.every_s)"
    raise ValueError(f"{path}: no checkpoint in it; {why}; name another")


def shapes_of(module: Module) -> Params:
    """A module's parameters as shapes and dtypes, layers stacked."""
    return module_structs(module, init_structs)


def saved_name(
    reader: CheckpointReader,
    module: str,
    path: Any,
    shape: tuple[int, ...],
    *,
    average: bool = False,
) -> str:
    """How a checkpoint calls a parameter, or its average over steps where there is one of it.

    Args:
      path: of the parameter in its module's tree.

    Raises:
      ValueError: it has no average of any, or no such parameter of this shape.
    """
    if average and not any(f"/{AVERAGE}/" in name for name in reader.specs):
        raise ValueError(
            f"{reader}: has no average of the parameters; train with train.ema, or leave out --ema"
        )
    where = jax.tree_util.keystr(path, simple=True, separator="/")
    array, mean = f"params/{module}/{where}", f"opt_state/{module}/{AVERAGE}/{where}"
    if average and mean in reader.specs:
        array = mean
    spec = reader.specs.get(array)
    if spec is None or spec.shape != shape:
        has = f"{array} as {list(spec.shape)}" if spec else f"no {array}"
        raise ValueError(
            f"{reader}: has {has}, the model needs {list(shape)}; give the experiment that it was "
            "trained with"
        )
    return array


def _read_module(
    reader: CheckpointReader,
    name: str,
    structs: Params,
    *,
    as_saved: bool,
) -> Params:
    def read(path: Any, struct: jax.ShapeDtypeStruct) -> jax.Array:
        array = saved_name(reader, name, path, struct.shape)

        @cache  # devices may hold the same
        def box(*bounds: tuple[int, int]) -> np.ndarray:
            data = reader.read(array, [lo for lo, _ in bounds], [hi - lo for lo, hi in bounds])
            return data if as_saved else data.astype(struct.dtype, copy=False)

        def shard(index: Any) -> np.ndarray:
            ranges = (s.indices(n) for s, n in zip(index, struct.shape, strict=True))
            return box(*((lo, hi) for lo, hi, _ in ranges))

        return jax.make_array_from_callback(struct.shape, struct.sharding, shard)

    return jax.tree_util.tree_map_with_path(read, structs)
