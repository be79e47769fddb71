"""A made-up graph of modules trains: its gradients equal the plain computation under any layout."""

import functools

import jax
import numpy as np
import pytest

from dflop_jax.records import Prices, Shape
from dflop_jax.runtime import parameter_layout, segment
from dflop_jax.schedule.batch_scheduler import schedule_batch
from tests.graphs.made_up import GRAINS, MadeUp, MadeUpData, plain_loss, scales_of
from tests.plans import graph_plan, programs
from tests.runtime import plain
from tests.runtime.test_gradients import assert_norm, assert_trees_close, grads_of

MODEL = MadeUp()
SHAPES = {"sights": Shape(3, 64), "smells": Shape(16, GRAINS), "words": Shape(2, 192),
          "echoes": Shape(1, 40)}  # fmt: skip
TWO = (1, 2, 1)  # data ranks
LAYOUTS = {  # see `graph_plan`
    "all apart": {
        "sights": [(1, 0), (3, 1)], "smells": [(2, 2, TWO)],
        "words": [(2, 4), (4, 5), (6, 6)], "echoes": [(2, 7)],
    },
    "two ranks each, shared": {
        "sights": [(3, 0, TWO)], "smells": [(2, 0)],
        "words": [(3, 2, TWO), (6, 4, TWO)], "echoes": [(2, 4, TWO)],
    },
    "one device": {m: [(module.n_layers, 0)] for m, module in MODEL.modules.items()},
}  # fmt: skip


def make_plan(layout, fan_in=1):
    divided = ("echoes",) if fan_in > 1 else ()
    # Small enough that a group of words needs two groups of each.
    small = {"sights": Shape(1, 40), "echoes": Shape(1, 6)} if fan_in > 1 else {}
    shapes = SHAPES | small
    return graph_plan(MODEL, LAYOUTS[layout], shapes, fan_in=fan_in, divided_readers=divided)


@functools.cache
def oracle(n=8):
    """(samples, parameters, scales, loss, gradients), one sample at a time on one device."""
    data = MadeUpData(n, kinds=5)  # few, so that the oracle compiles few programs
    samples = [data.sample(i) for i in range(n)]
    scales = scales_of(samples)
    params = plain.fresh_params(MODEL, make_plan("one device"))
    every_args = []
    for s in samples:
        places = {
            edge: (p.index, np.ones(p.index.shape, np.float32) if p.weight is None else p.weight)
            for edge, p in s.gathers.items()
        }
        every_args.append((tuple(s.load.pieces.items()), s.fields, places, scales))
    value_and_grad = jax.jit(jax.value_and_grad(plain_loss), static_argnums=1)
    with jax.numpy_rank_promotion("allow"):
        return samples, params, scales, *plain.summed(value_and_grad, params, every_args)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    "layout, fan_in, unrolled",
    [("one device", 1, 0), ("all apart", 1, 8), ("two ranks each, shared", 2, 0)],
)
def test_step_equals_plain_computation(layout, fan_in, unrolled, monkeypatch):
    monkeypatch.setattr(segment, "max_unrolled_layers", lambda chip: unrolled)
    monkeypatch.setattr(parameter_layout, "MIN_SPLIT_ELEMENTS", 100)  # some of a layer's arrays
    samples, params, scales, want_loss, want = oracle()
    plan = make_plan(layout, fan_in)
    names = [segment.name for segment in plan.layout.segments]
    loads = [s.load for s in samples]
    schedule = schedule_batch(loads, plan, Prices(programs(plan)), names, work=0)
    fed = max(len(schedule.feeders(i, "sights")) for i in range(len(schedule.groups)))
    read = max(sum(schedule.groups[f].module == "echoes" for f in g.feeds) for g in schedule.groups)
    assert fed == read == fan_in
    loss, grads, start, result = grads_of(
        MODEL, plan, samples, schedule, scales=scales, clip_norm=0.0, evaluates=True
    )
    jax.tree.map(np.testing.assert_array_equal, start, params)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert_norm(result, want)  # in which the tied parameter counts once
    assert all(np.abs(w).max() > 0 for w in jax.tree.leaves(want))
    assert_trees_close(grads, want)
