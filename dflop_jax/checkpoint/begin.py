"""Parameters of another run, to begin with: those of one of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from dflop_jax.checkpoint.reader import CheckpointReader
from dflop_jax.checkpoint.state_arrays import parameter_arrays, read_array
from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.contract import Params
from dflop_jax.pipeline.held import initial_structs
from dflop_jax.pipeline.segment import Segment


def open_saved(checkpoints: Path, step: int | None) -> CheckpointReader:
    """The checkpoint of a step, the newest for None.

    Raises:
      ValueError: it is not there.
      CorruptCheckpoint, StorageError, OtherVersion: it cannot be read.
    """
    store = CheckpointStore(checkpoints)
    steps = store.steps()
    if not steps or (step is not None and step not in steps):
        raise ValueError(store.no_step(step, steps))
    return store.open(steps[0] if step is None else step)


def read_saved(reader: CheckpointReader, segment: Segment, fresh: Callable[[], Params]) -> Params:
    """A segment's parameters from a checkpoint of a run of the same model under any plan. Parts of
    which it has nothing (adapters that the run had not) are fresh.

    Raises:
      ValueError: it has nothing of the module, parts that the module has not, or other shapes.
    """
    module, where = segment.plan.module, f"the checkpoint of step {reader.step}"
    known = {part_of(name) for name in reader.specs if name.startswith(f"params/{module}/")}
    if not known:
        raise ValueError(
            f"{where} has no parameters of {module}: it is of another model, name a run of this one"
        )
    if lost := sorted(known - set(segment.module.inputs)):
        raise ValueError(
            f"{where} has {', '.join(lost)} of {module}, which this model has not (adapters need "
            "train.lora_rank; or begin with an export, which merges them)"
        )
    leaves: list[Any] = []
    drawn: list[Any] = []
    for a in parameter_arrays(segment.name, segment):
        if part_of(a.name) not in known:
            drawn = drawn or jax.tree.leaves(fresh())
            leaves.append(drawn[a.leaf])
            continue
        spec = reader.specs.get(a.name)
        if spec is None or spec.shape != a.shape:
            has = list(spec.shape) if spec else "nothing"
            raise ValueError(
                f"{where} has {has} as {a.name}, this model needs {list(a.shape)}: it is of "
                "another model, name a run of this one"
            )
        leaves.append(read_array(reader, a))
    return jax.tree.unflatten(jax.tree.structure(initial_structs(segment)), leaves)


def part_of(array: str) -> str:
    """The part of a module that a parameter is in, by the name of its array."""
    return array.split("/")[2]
