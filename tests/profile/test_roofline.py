"""Predicted profiles: the roofline by hand, what small shapes cost, and constants fitted back."""

import dataclasses

import numpy as np
import pytest

from dflop_jax.config import PlanConfig
from dflop_jax.hardware import find_hardware
from dflop_jax.plan.search import search_plan
from dflop_jax.profile.collectives import all_reduce_s
from dflop_jax.profile.efficiency import Efficiency, Table, fit_efficiency
from dflop_jax.profile.fit import CostModel
from dflop_jax.profile.kernels import ATTENTION, ELEMENTWISE, LOOKUP, MATMUL, REDUCE, Kernel
from dflop_jax.profile.roofline import roofline_profile
from dflop_jax.record_files import load, save
from dflop_jax.records import (
    DataProfile,
    LayerTiming,
    ModelProfile,
    ModuleShape,
    SampleShape,
)
from models.llava import build

A100 = find_hardware("a100-80")
CPU = find_hardware("cpu")
NANO = build("nano", "bfloat16")
TINY = build("tiny")
SHAPES = {
    "vision": [ModuleShape(n, 16) for n in (1, 4, 16, 64)],
    "llm": [ModuleShape(i, t) for i, t in ((1, 32), (1, 96), (4, 96), (2, 384))],
}


def seconds(kernel, e=None, ways=1, hardware=A100):
    return Table.of([[kernel]], [ways], hardware).seconds(e or Efficiency())[0]


def product(n, kind=MATMUL, rows=None, dtype="bfloat16"):
    rows = rows or n
    return Kernel(kind, 2.0 * rows * n * n, 2.0 * (n * n + 2 * rows * n), rows, n, n, dtype)


def test_each_kind_of_kernel_by_hand():
    e = Efficiency()
    n = 4096
    reach = (n / (n + e.half_dim)) ** 3
    compute = 2 * n**3 / (312e12 * e.matmul * reach)
    assert seconds(product(n)) == pytest.approx(compute + e.launch_s)
    assert seconds(product(n, dtype="float32")) == pytest.approx(2 * compute + e.launch_s)
    attention = compute * e.matmul / e.attention
    assert seconds(product(n, ATTENTION)) == pytest.approx(attention + e.launch_s)
    moved = 1e9 / 2039e9
    assert seconds(Kernel(ELEMENTWISE, 0, 1e9)) == pytest.approx(moved / e.bandwidth + e.launch_s)
    assert seconds(Kernel(LOOKUP, 0, 1e9)) == pytest.approx(moved / e.lookup + e.launch_s)
    reduced = seconds(Kernel(REDUCE, 0, 1e9), ways=4)
    assert reduced == pytest.approx(all_reduce_s(1e9, 4, A100, reach=e.link))
    assert Table.of([[], [product(8)]], [1, 1], A100).seconds(e)[0] == 0.0
    twice = Kernel(ELEMENTWISE, 0, 1e9, repeats=2)
    assert seconds(twice) == pytest.approx(2 * seconds(Kernel(ELEMENTWISE, 0, 1e9)))


def test_few_rows_are_bound_by_the_parameters_they_read():
    e = Efficiency()
    n = 8192
    got = seconds(product(n, rows=1))
    assert got == pytest.approx(2 * (n * n + 2 * n) / (2039e9 * e.bandwidth) + e.launch_s)
    per_row = [seconds(product(n, rows=r)) / r for r in (1, 16, 256, 4096)]
    assert per_row == sorted(per_row, reverse=True)


def test_products_reach_what_the_docstring_says_of_the_defaults():
    for n, share in ((1024, 0.48), (2048, 0.70), (4096, 0.76)):
        reached = 2 * n**3 / 312e12 / seconds(product(n))
        assert reached == pytest.approx(share, abs=0.01)


@pytest.fixture(scope="module")
def profile():
    return roofline_profile(NANO, A100, SHAPES, (1, 2, 4), n_devices=4)


def test_a_predicted_profile_is_a_profile(profile, tmp_path):
    """The same records as measuring gives: saved, loaded, fitted and planned with."""
    assert {(t.module, t.model) for t in profile.timings} == {
        ("vision", 1),
        ("vision", 2),
        ("vision", 4),
        ("llm", 1),
        ("llm", 2),  # 2 kv heads do not divide over 4
    }
    assert all(t.layer_backward_s > t.layer_forward_s > 0 for t in profile.timings)
    assert all(t.ends_forward_s > 0 and t.layer_temp_bytes > 0 for t in profile.timings)
    assert profile.device == "a100-80"
    assert all(0 < share < 1 for share in profile.entry_share.values())
    save(profile, tmp_path / "p.json")
    assert load(ModelProfile, tmp_path / "p.json") == profile
    again = roofline_profile(build("nano", "bfloat16"), A100, SHAPES, (4, 2, 1), n_devices=4)
    assert again == profile
    other = roofline_profile(NANO, find_hardware("h100"), SHAPES, (1,), n_devices=4)
    assert other.key != profile.key
    model = CostModel(profile)
    for t in profile.timings:
        got = model.predict(t.module, t.model, t.shape.items, t.shape.tokens, "layer_backward")
        assert got == pytest.approx(t.layer_backward_s, rel=0.1)


def test_plans_are_searched_on_predicted_profiles(profile):
    data = DataProfile("d", 3, tuple(SampleShape(n, 20, 20 + 4 * n) for n in (1, 2, 6)))
    config = PlanConfig(policy="auto", buckets=2, sampled_batches=2, effort="quick", max_model=2)
    plan = search_plan(
        profile, data, n_devices=2, global_batch=16, config=config, memory_bytes=80e9, tied=True
    ).plan
    assert plan.n_devices <= 2
    assert 0 < plan.predicted["makespan_s"] < 1


def timing(profile, module, model, shape):
    return next(
        t for t in profile.timings if (t.module, t.model, t.shape) == (module, model, shape)
    )


def test_small_encoder_batches_and_high_degrees_cost_what_they_cost(profile):
    per_tile = [timing(profile, "vision", 1, s).layer_forward_s / s.items for s in SHAPES["vision"]]
    assert per_tile == sorted(per_tile, reverse=True)
    assert per_tile[0] > 4 * per_tile[-1]
    shape = SHAPES["llm"][-1]
    one, two = (timing(profile, "llm", d, shape).layer_forward_s for d in (1, 2))
    assert two > one / 2
    slow = dataclasses.replace(A100, link_bandwidth=1e9, network_bandwidth=0.5e9)
    slower = roofline_profile(NANO, slow, SHAPES, (1, 2), n_devices=4)
    assert timing(slower, "llm", 1, shape).layer_forward_s == one
    assert timing(slower, "llm", 2, shape).layer_forward_s > two


def test_what_cannot_be_predicted_is_refused():
    def predict(shapes=SHAPES, degrees=(1,), n_devices=4, hardware=A100):
        return roofline_profile(NANO, hardware, shapes, degrees, n_devices=n_devices)

    with pytest.raises(ValueError, match="at least one shape of the module 'llm'"):
        predict({"vision": SHAPES["vision"]})
    with pytest.raises(ValueError, match="without items takes no time"):
        predict({**SHAPES, "vision": [ModuleShape(0, 16)]})
    for bad in ({"n_devices": 0}, {"degrees": ()}, {"degrees": (1, 0)}):
        with pytest.raises(ValueError, match="nothing below 1"):
            predict(**bad)
    with pytest.raises(ValueError, match=r"none of .* \[3\] divides the sizes of 'vision'"):
        predict(degrees=(3,))
    single = dataclasses.replace(A100, devices_per_node=1)
    with pytest.raises(ValueError, match="fits into a node of 1; add 1"):
        predict(degrees=(2,), hardware=single)
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="efficiency matmul"):
            Efficiency(matmul=bad)


TRUTH = Efficiency(
    matmul=0.55, attention=0.3, half_dim=20.0, bandwidth=0.5, lookup=0.15, launch_s=9e-6, link=0.4
)


def test_constants_that_made_a_profile_are_fitted_back():
    shapes = {
        "vision": [ModuleShape(n, 36) for n in (1, 4, 16, 64, 256)],
        "llm": [ModuleShape(i, t) for i, t in ((1, 32), (1, 128), (4, 512), (1, 2048))],
    }
    made = roofline_profile(TINY, CPU, shapes, (1, 2), n_devices=8, efficiency=TRUTH)
    found = fit_efficiency(made, TINY, CPU)
    for name in ("matmul", "attention", "half_dim", "bandwidth", "launch_s", "link"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=0.05), name
    # Where devices share cores, degrees above what really computes at once tell nothing of links.
    alone = fit_efficiency(dataclasses.replace(made, concurrency=1.0), TINY, CPU)
    assert alone.link == pytest.approx(Efficiency().link, rel=0.01)
    assert alone.matmul == pytest.approx(TRUTH.matmul, rel=0.05)


def test_a_profile_of_another_model_is_refused(profile):
    with pytest.raises(ValueError, match="the profile is of another model"):
        fit_efficiency(profile, TINY, A100)
    nothing = [
        dataclasses.replace(
            t, layer_forward_s=0, layer_backward_s=0, ends_forward_s=0, ends_backward_s=0
        )
        for t in profile.timings
    ]
    with pytest.raises(ValueError, match="no time above 0"):
        fit_efficiency(dataclasses.replace(profile, timings=tuple(nothing)), NANO, A100)


# Milliseconds of a layer and of the ends (forward, backward) of `tiny` in float32, measured once on
# two cores of a server CPU; noise made some ends nothing.
MEASURED = {
    "vision": {
        (4, 36): (0.293, 1.638, 0.403, 1.186),
        (16, 36): (1.366, 6.096, 0.668, 0.0),
        (32, 36): (2.499, 11.575, 1.029, 0.187),
        (64, 36): (4.248, 23.488, 2.476, 0.562),
    },
    "llm": {
        (1, 96): (1.204, 3.967, 0.085, 0.323),
        (1, 352): (2.906, 11.489, 4.491, 6.286),
        (1, 704): (8.635, 37.708, 4.082, 0.0),
        (4, 96): (2.646, 11.234, 1.836, 0.446),
        (2, 352): (7.495, 25.636, 3.185, 0.026),
    },
}


def test_a_measured_profile_predicts_the_shapes_left_out():
    """Each shape from the others: median within 35%, backward always within a factor of 1.6."""
    rows = [
        LayerTiming(m, 1, ModuleShape(*shape), *np.array(ms) / 1e3)
        for m, table in MEASURED.items()
        for shape, ms in table.items()
    ]
    shapes = {m: [ModuleShape(*s) for s in table] for m, table in MEASURED.items()}
    base = roofline_profile(TINY, CPU, shapes, (1,), n_devices=1)
    missed_f, missed_b = [], []
    for i, left_out in enumerate(rows):
        rest = dataclasses.replace(base, timings=tuple(rows[:i] + rows[i + 1 :]))
        e = fit_efficiency(rest, TINY, CPU)
        again = roofline_profile(TINY, CPU, shapes, (1,), n_devices=1, efficiency=e)
        got = timing(again, left_out.module, 1, left_out.shape)
        missed_f.append(abs(np.log(got.layer_forward_s / left_out.layer_forward_s)))
        missed_b.append(abs(np.log(got.layer_backward_s / left_out.layer_backward_s)))
    assert np.median(missed_f + missed_b) < np.log(1.35)
    assert max(missed_b) < np.log(1.6)
    default = roofline_profile(TINY, CPU, shapes, (1,), n_devices=1)
    far = [
        abs(np.log(timing(default, r.module, 1, r.shape).layer_backward_s / r.layer_backward_s))
        for r in rows
    ]
    assert np.median(missed_b) < np.median(far)
