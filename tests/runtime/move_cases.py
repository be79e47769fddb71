"""Layouts to move a state between, and the comparison with a checkpoint's restored state."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import jax
import numpy as np

from dflop_jax.checkpoint.checkpointer import Checkpointer
from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.runtime.communicator import shard_array
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.move_state import StateMove, move_state, plan_move
from dflop_jax.runtime.state_arrays import put_leaves, split_masters, state_arrays


def fill(ex: Executor, seed: int) -> None:
    """Random values in every array of the state, equal on all processes."""
    ex.init_for_restore()
    rng = np.random.default_rng(seed)
    values: dict[str, np.ndarray] = {}
    trees: dict[tuple[str, str], list[jax.Array]] = {}
    for a in state_arrays(ex):
        if a.name not in values:
            values[a.name] = rng.normal(size=a.shape) * 10 + 40
        value = values[a.name].astype(a.struct.dtype)
        mine = value if a.n_rows is None else value[list(a.rows)]
        leaf = shard_array(np.asarray(a.cut.to_stored(mine)), a.struct.sharding)
        trees.setdefault(a.tree, []).append(leaf)
    for tree, leaves in trees.items():
        put_leaves(ex, *tree, leaves)
    split_masters(ex)


def local_state(ex: Executor) -> list[tuple[str, tuple, dict]]:
    """Path, sharding and this process's shards of every array."""
    state = ex.state
    trees = {n: getattr(state, n) for n in ("params", "masters", "opt_state", "grads", "shared")}
    return [
        (
            jax.tree_util.keystr(path),
            (leaf.shape, leaf.dtype, leaf.sharding),
            {s.device.id: np.array(s.data) for s in leaf.addressable_shards},
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(trees)
    ]


def check_move(source: Executor, target: Executor, folder: Path, peers: ProcessGroup) -> StateMove:
    """Move the source's state, and compare it to the bit with the restored checkpoint of it."""
    saver = Checkpointer(folder, source, peers, keep=1)
    meta: Future = Future()
    meta.set_result({})
    saver.save(1, meta)
    saver.wait()
    peers.barrier("saved")
    move = plan_move(source, target)
    move_state(move, source, target, lambda: peers.barrier("moving"))
    assert not source.state.params
    moved = local_state(target)
    target.init_for_restore()
    Checkpointer(folder, target, peers, keep=1).restore(saver.store.open(1))
    restored = local_state(target)
    assert [m[:2] for m in moved] == [r[:2] for r in restored]
    for (name, _, got), (_, _, want) in zip(moved, restored, strict=True):
        assert got.keys() == want.keys(), name
        for device, shard in got.items():
            np.testing.assert_array_equal(shard, want[device], err_msg=name)
    return move
