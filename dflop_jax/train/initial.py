"""Parameters that a run begins with: published weights, or those of another run, of the whole model
or of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dflop_jax.checkpoint.begin import open_saved, read_saved
from dflop_jax.checkpoint.store import CorruptCheckpoint, OtherVersion, StorageError
from dflop_jax.contract import MultimodalModel, Params
from dflop_jax.pipeline.segment import Segment
from dflop_jax.report.run_folder import CHECKPOINTS
from dflop_jax.train.run_dir import run_config
from dflop_jax.weights import Folder, read_segment

# (segment, its fresh parameters if they are asked for) -> parameters to begin with
Initial = Callable[[Segment, Callable[[], Params]], Params]


def published(model: MultimodalModel, weights: Sequence[str]) -> Initial | None:
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
    by_module: dict[str, Initial] = {}
    for item in weights:
        module, _, path = item.rpartition("=")
        if (saved := _of_run(path)) is not None:
            by_module[module] = saved
            continue
        if not Path(path).is_dir():
            raise ValueError(
                f"model.weights={path}: no such folder of weights or run; name one, or train it "
                "first"
            )
        folder = Folder(path, map_of(model, module, len(weights) == 1))
        folder.check()
        by_module[module] = partial(read_segment, folder)

    def begin(segment: Segment, fresh: Callable[[], Params]) -> Params:
        read = by_module.get("") or by_module.get(segment.plan.module)
        return fresh() if read is None else read(segment, fresh)

    return begin


def first_weights(weights: Sequence[str]) -> dict[str, str]:
    """The published folders that a run with these `model.weights` began with, by module ("": the
    whole model); of one that began with another run's parameters, those of that run."""
    found: dict[str, str] = {}
    for item in weights:
        module, _, path = item.rpartition("=")
        run = run_and_step(path)[0]
        if not Path(run, CHECKPOINTS).is_dir():
            found[module] = path
            continue
        before = first_weights(run_config(run).model.weights)
        found |= before if not module else {module: before.get(module) or before.get("", "")}
    return {module: path for module, path in found.items() if path}


def run_and_step(path: str) -> tuple[str, str, str]:
    """A run's folder, and behind "@" the step, if it is named."""
    return path.rpartition("@") if "@" in path and not Path(path).exists() else (path, "", "")


def _of_run(path: str) -> Initial | None:
    """What reads the checkpoint that RUN or RUN@STEP means; None where it is no run's folder."""
    run, at, step = run_and_step(path)
    checkpoints = Path(run, CHECKPOINTS)
    if not checkpoints.is_dir():
        return None
    if at and not step.isdecimal():
        raise ValueError(f"model.weights={path}: {step!r} is no step; give RUN@STEP, or RUN")
    try:
        return partial(read_saved, open_saved(checkpoints, int(step) if at else None))
    except (CorruptCheckpoint, OtherVersion, StorageError) as e:
        raise ValueError(f"model.weights={path}: {e}; give RUN@STEP of another one") from None


def map_of(model: MultimodalModel, module: str, alone: bool) -> Any:
    """Return where a checkpoint has the parameters of a module, or ("") of the whole model."""
    if not module:
        if not alone:
            raise ValueError(
                "model.weights: give one folder of the whole model, or MODULE=FOLDER each"
            )
        whole = getattr(model, "weights", None)
        if whole is None:
            raise ValueError(
                "model.weights: this model has no published form; give MODULE=FOLDER for its parts"
            )
        return whole
    parts = getattr(model, "part_weights", {})
    if module not in parts:
        known = ", ".join(parts) or "none"
        raise ValueError(f"model.weights: no published weights of {module!r}; known: {known}")
    return parts[module]()
