"""A process of the test over several: one step of a small Qwen3-VL from a folder, its own gradients
compared with those that the parent left in a file."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

from dflop_jax.pipeline.executor import Executor
from dflop_jax.pipeline.programs import GroupArrays
from dflop_jax.weights import Folder, read_segment

from .qwen3_vl_cases import MODEL, SCHEDULE, plan_of_processes


def main(args: list[str]) -> None:
    folder, left = (Path(a) for a in args)
    source, want = Folder(folder, MODEL.weights), np.load(left / "want.npz")
    ex = Executor(MODEL, plan_of_processes(), optax.sgd(1.0), clip_norm=0.0)
    ex.init(0, begin=lambda segment, _: read_segment(source, segment))
    ex.compile(sync=lambda: multihost_utils.sync_global_devices("compiled"))
    before = own_parameters(ex)
    sums = ex.run_step(SCHEDULE, arrays_of(left), {"llm": 1.0}).local().sums
    after = own_parameters(ex)
    for (name, where, rows), value in before.items():
        full = want[where][slice(*rows)] if rows else want[where]
        error = np.abs(value.astype(np.float64) - after[name, where, rows] - full).max()
        assert error <= 1e-4 * np.abs(full).max(), (name, where, error)
    print("compared", len(before))
    print("loss", sums.get("llm.loss_sum", 0.0))
    ex.close()


def own_parameters(ex: Executor) -> dict:
    """{(segment, name of the whole tensor, its layers): array} of this process."""
    found = {}
    for name in ex.programs.local:
        segment = ex.programs.segments[name]
        for part in segment.own_parts:
            tree = ex.state.params[name][part]
            rows = (segment.plan.start, segment.plan.stop) if part == "layers" else None
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                where = f"['{segment.plan.module}']['{part}']{jax.tree_util.keystr(path)}"
                found[name, where, rows] = np.asarray(leaf)
    return found


def arrays_of(left: Path) -> list[GroupArrays]:
    """What the parent packed."""
    groups = [GroupArrays({}, {}) for _ in SCHEDULE.groups]
    for key, array in np.load(left / "fields.npz").items():
        g, name = key.split()
        groups[int(g)].fields[name] = array
    for key, array in np.load(left / "places.npz").items():
        g, source, _ = key.split()  # in the order in which they were written
        places = groups[int(g)].places
        places[int(source)] = (*places.get(int(source), ()), array)
    return groups
