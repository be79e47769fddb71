"""Executors with states to save, and how they are compared."""

from __future__ import annotations

import dataclasses
import functools
from concurrent.futures import Future

import jax
import numpy as np
import pytest

from dflop_jax.checkpoint.checkpointer import Checkpointer
from dflop_jax.config import TrainConfig
from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.runtime.communicator import shard_array, zeros
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.parameter_layout import (
    owned_param_structs,
    param_zero_specs,
    state_zero_specs,
)
from dflop_jax.runtime.state_arrays import StateArray, state_arrays
from dflop_jax.train.optimizer import make_optimizer
from models.llava import build

from ..runtime import plain

# name -> (vision (first, stage, data, model), llm, options)
PLANS = {
    "one device each": ((0, 1, 1, 1), (1, 1, 1, 1), {}),
    "4 LLM segments": ((0, 1, 2, 1), (2, 1, 1, 1), {"llm_segments": 4}),
    "stage 2 in 2 rounds": ((0, 1, 2, 1), (2, 2, 1, 1), {"group_size": 2, "rounds": 2}),
    "tp 2": ((0, 1, 1, 2), (2, 1, 1, 2), {}),
    "dp 3": ((0, 1, 2, 1), (2, 1, 3, 1), {}),
    "2 segments of stage 2, dp 2": (
        (0, 2, 2, 1),
        (0, 2, 2, 1),
        {"llm_segments": 2, "group_size": 2},
    ),
    "all on the same 8": ((0, 1, 4, 2), (0, 2, 2, 2), {"group_size": 2}),
}
TRAIN = TrainConfig(steps=20, warmup_steps=0, learning_rate=1e-2)


@functools.cache
def model(n_layers: int = 4):
    """Nano with an untied head, so that its LLM can be cut into segments."""
    nano = build("nano")
    decoder = dataclasses.replace(nano.size.decoder, tied=False, n_layers=n_layers)
    return dataclasses.replace(nano, size=dataclasses.replace(nano.size, decoder=decoder))


def executor(name: str, *, freeze=(), n_layers=4) -> Executor:
    vision, llm, options = PLANS[name]
    m = model(n_layers)
    plan = plain.plan_of(m, vision, llm, **options)
    ex = Executor(m, plan, make_optimizer(TRAIN), clip_norm=1.0, freeze=freeze)
    # Zeros: cheaper than `init`.
    for n, segment in ex.programs.segments.items():
        ex.state.params[n] = jax.tree.map(zeros, owned_param_structs(segment))
        if n in ex.trainable:
            update = ex.programs.updates[n]
            ex.state.masters[n] = jax.tree.map(zeros, update.master_structs)
            ex.state.opt_state[n] = jax.tree.map(zeros, update.state_structs)
    return ex


@dataclasses.dataclass(frozen=True)
class Run:
    """An executor, what its state is called in a checkpoint, and a saver of it."""

    ex: Executor
    arrays: list[StateArray]
    saver: Checkpointer


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One of each plan, made when asked for."""
    made: dict[str, Run] = {}

    def get(name: str) -> Run:
        if name not in made:
            ex = executor(name)
            made[name] = Run(ex, state_arrays(ex), saver_of(ex, tmp_path_factory.mktemp("run")))
        return made[name]

    yield get
    for run in made.values():
        run.ex.close()


def saver_of(ex, folder, *, keep=3) -> Checkpointer:
    return Checkpointer(folder, ex, ProcessGroup(), keep=keep)


def save(saver: Checkpointer, step: int, meta=None) -> None:
    known: Future = Future()
    known.set_result(meta or {})
    saver.save(step, known)
    saver.wait()


def reader_of(saver: Checkpointer, step: int):
    return saver.store.open(step)


def fill(ex: Executor, seed: int) -> None:
    """Random parameters and moments, and counters that are equal in all segments."""
    rng = np.random.default_rng(seed)

    def one(leaf):
        whole = np.issubdtype(leaf.dtype, np.integer)
        host = np.full(leaf.shape, 100 + seed) if whole else rng.normal(size=leaf.shape)
        return shard_array(host.astype(leaf.dtype), leaf.sharding)

    ex.state.params = jax.tree.map(one, ex.state.params)
    ex.state.opt_state = jax.tree.map(one, ex.state.opt_state)


def joined(ex: Executor):
    """Parameters, both moments and the counters on the host, without a trace of the plan."""
    adam = {n: state[0] for n, state in ex.state.opt_state.items()}
    trees = [ex.state.params, *({n: getattr(a, k) for n, a in adam.items()} for k in ("mu", "nu"))]
    segments = ex.programs.segments.items()
    held, split = ({n: of(s) for n, s in segments} for of in (param_zero_specs, state_zero_specs))
    leaves = jax.tree.leaves(ex.state.opt_state)
    counts = {int(a) for a in leaves if np.issubdtype(a.dtype, np.integer)}
    cuts = (held, split, split)
    return [plain.join(ex.plan, *one) for one in zip(trees, cuts, strict=True)], counts


def assert_same(got, want) -> None:
    assert got[1] == want[1]
    for g, w in zip(got[0], want[0], strict=True):
        assert jax.tree.structure(g) == jax.tree.structure(w)
        jax.tree.map(np.testing.assert_array_equal, g, w)
