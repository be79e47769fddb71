"""Profiles, prices, bytes and needed FLOPs of a module with layers of two kinds, against the same
of modules with one of them."""

import dataclasses

import numpy as np
import pytest

from dflop_jax import records
from dflop_jax.cli.plan import kind_table
from dflop_jax.contract import layer_kinds_of
from dflop_jax.hardware import find_hardware
from dflop_jax.plan.explain import kind_costs
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.profile.needed import needed_flops
from dflop_jax.profile.roofline import roofline_profile
from dflop_jax.records import BACKWARD, FORWARD, DataProfile, Load, MeshShape, Profile, Shape
from tests.mixed import UNITS, Mixed
from tests.plans import group_s, segment_bytes
from tests.small import HIDDEN, WIDTH

MIXED = Mixed(tied=False, pattern="gmmmgm")
SHAPES = {"vision": [Shape(1, 16), Shape(8, 16)], "llm": [Shape(1, 32), Shape(2, 96)]}
A100 = find_hardware("a100-80")


@pytest.fixture(scope="module")
def costs():
    return CostModel(roofline_profile(MIXED, A100, SHAPES, [1, 2], n_devices=8))


def segment(start, stop, **more):
    return records.SegmentPlan("s", "llm", start, stop, "s", start == 0, stop == 6, **more)


def one_kind(profile, kind):
    """The profile of the module as if all its layers were of a kind."""
    key = f"llm.{kind}"
    timings = tuple(
        dataclasses.replace(t, kind="layers")
        for t in profile.timings
        if t.module == "vision" or t.kind == kind
    )
    own = {"llm": profile.layer_dims[key]}
    return dataclasses.replace(profile, timings=timings, kinds={}, layer_dims=own)


@pytest.mark.parametrize("start, stop, stages", [(0, 6, 1), (1, 4, 1), (1, 5, 2)])
@pytest.mark.parametrize("remat, zero", [("none", 1), ("layers", 3), ("segment", 3)])
def test_segment_of_two_kinds_costs_the_mean_of_both(costs, start, stop, stages, remat, zero):
    """As the mean of modules of one kind, by the number of its layers of each."""
    mixed, mesh = segment(start, stop, remat=remat, zero=zero), MeshShape(stage=stages, data=2)
    kinds = layer_kinds_of(MIXED.modules["llm"])[start:stop]
    apart = {k: CostModel(one_kind(costs.profile, k)) for k in ("mean", "gate")}
    share = {k: kinds.count(k) / len(kinds) for k in apart}
    rows, tokens = np.array([1, 2, 0]), np.array([32, 96, 0])

    def mean(of):
        return sum(share[k] * of(apart[k]) for k in apart)

    for direction in (FORWARD, BACKWARD):
        got = group_s(costs, mixed, mesh, 4, rows, tokens, direction)
        want = mean(lambda c, d=direction: group_s(c, mixed, mesh, 4, rows, tokens, d))
        np.testing.assert_allclose(got, want, rtol=2e-2)  # the ends, beside layers of either kind
        assert got[2] == 0.0
    got = segment_bytes(costs, mixed, mesh, 4, rows, tokens)
    every = {k: segment_bytes(c, mixed, mesh, 4, rows, tokens) for k, c in apart.items()}
    np.testing.assert_allclose(got.state, sum(share[k] * b.state for k, b in every.items()))
    np.testing.assert_allclose(got.residuals, sum(share[k] * b.residuals for k, b in every.items()))
    most = np.maximum(*(b.temporaries for b in every.values()))
    assert (got.temporaries <= most * (1 + 1e-9)).all()


def test_needed_flops_by_hand():
    """A layer of means has three products, one of them of two activations; a gated one has four."""
    n, width = 24, WIDTH
    mean = 2 * (2 * width * HIDDEN), 2 * width  # of a token with parameters, of a pair
    gate = 2 * (3 * width * UNITS), 2 * width
    head = 2 * width * MIXED.vocab_size
    every = needed_flops(MIXED, {"vision": 16, "llm": n})["llm"]
    per_pair = 4 * mean[1] + 2 * gate[1]
    # What sums up tokens is given: only the sum needs a gradient.
    want = 3 * n * (4 * mean[0] + 2 * gate[0] + head) + 2 * n * n * per_pair
    assert every(n) == pytest.approx(want)
    frozen = needed_flops(MIXED, {"llm": n}, ("llm",))["llm"]
    # The first gate has nothing before it that trains.
    without = 2 * width * UNITS * 2  # gate and value: their inputs need no gradient there
    want = n * (3 * 2 * gate[0] - without + 2 * 4 * mean[0] + 2 * head)
    want += n * n * (2 * per_pair - gate[1])
    assert frozen(n) == pytest.approx(want)


def test_layer_costs_are_reported_by_kind(costs):
    """Of the largest shape; attention of samples as they are is in it."""
    profile, full = costs.profile, DataProfile("full", 1, (Load({"llm": (96,)}),))
    told = kind_costs(Profile(profile, full))
    assert [(c.module, c.kind) for c in told] == [
        ("vision", "layers"), ("llm", "gate"), ("llm", "mean")
    ]  # fmt: skip
    assert [c.layers for c in told] == [2, 2, 4]
    _, gate, mean = told
    assert gate.share + mean.share == pytest.approx(1)
    assert gate.shape == Shape(2, 96)
    alone = CostModel(dataclasses.replace(profile, host_s=0.0, task_overhead_s=0.0))
    one = group_s(alone, segment(1, 2), MeshShape(), 1, 2, 96, FORWARD)  # a mean
    assert mean.forward_s == pytest.approx(one, rel=0.05)  # fitted over shapes
    seconds = [c.layers * (c.forward_s + c.backward_s) for c in (gate, mean)]
    assert gate.share / mean.share == pytest.approx(seconds[0] / seconds[1])
    seen = [
        dataclasses.replace(t, content_forward_s={"pair": 1.0}, content_backward_s={"pair": 3.0})
        for t in profile.timings
    ]
    more = kind_costs(Profile(dataclasses.replace(profile, timings=tuple(seen)), full))
    assert more[1].forward_s - gate.forward_s == pytest.approx(2 * 96**2)
    assert more[1].backward_s - gate.backward_s == pytest.approx(3 * 2 * 96**2)
    assert [*kind_table(more).columns[0].cells] == ["vision", "llm.gate", "llm.mean"]
