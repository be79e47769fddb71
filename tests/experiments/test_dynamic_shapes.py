"""Steps with dynamic shapes against costs computed by hand."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from dflop_jax.hardware import find_hardware
from dflop_jax.plan.space import baseline_layouts
from dflop_jax.plan.space import separate_families as families
from dflop_jax.profile.cost_model import CostModel, layout_prices
from dflop_jax.profile.traced_parts import divides
from dflop_jax.records import Load
from experiments.paper import cases, costs, dynamic_shapes
from experiments.paper.cases import Case, Untuned
from experiments.paper.dynamic_shapes import simulate_batch
from experiments.paper.setups import INTERNVL_72B
from experiments.paper.tuning import make_plan, published_plan
from tests.plan.cases import TILE, layouts, model_profile, recompute

LAYERS = {"vision": 2, "llm": 4}
SPACE = {"max_model": 2, "max_stage": 4}
A100 = find_hardware("a100-80")
pytorch = partial(baseline_layouts, "pytorch")


def load(tiles, tokens):
    return Load({"vision": (TILE,) * tiles, "llm": (tokens,)})


LOADS = [load(3, 40), load(1, 100), load(5, 64), load(2, 32)]


def batch(n, seed=0):
    rng = np.random.default_rng(seed)
    return [load(t, k) for t, k in rng.integers((1, 20), (12, 200), (n, 2)).tolist()]


def profile():
    """The profile of tests.plan.cases with attention costs by squares of the LLM's samples."""
    whole = model_profile()
    timings = []
    for t in whole.timings:
        f, pair_s = (1e-4 + 2e-6 * t.shape.size) / t.model**0.7, 1e-8 / t.model**0.7
        llm = {
            "layer_forward_s": f,
            "layer_backward_s": 2 * f,
            "ends_forward_s": f,
            "ends_backward_s": 2 * f,
            "content_forward_s": {"pair": pair_s},
            "content_backward_s": {"pair": 2 * pair_s},
            "recompute": recompute(f, f, 100.0 * t.shape.size / t.model, 0.25, pair_s),
        }
        timings.append(replace(t, **llm) if t.module == "llm" else t)
    return replace(whole, timings=tuple(timings))


FREE = CostModel(profile())  # transfers take no time
MODEL = CostModel(replace(FREE.profile, hardware=A100))
CASE = Case("synthetic", lambda: None, batch, 4, 8, A100)


@pytest.fixture(autouse=True)
def made_up(monkeypatch):
    monkeypatch.setattr(costs, "_build_cost_model", lambda *_: MODEL)
    monkeypatch.setattr(cases, "TUNING_BATCHES", 2)


@pytest.fixture
def without_links(monkeypatch):
    """Give transfers between devices no time."""
    monkeypatch.setattr(
        dynamic_shapes, "get_prices", lambda _, plan: layout_prices(plan.layout, FREE)
    )


def plans(space, n):
    """Make plans for n devices; separate modules have no pipelines inside programs."""
    if space is families:
        parts = (p for p in layouts(families, n, LAYERS, **SPACE) if p.group_size == 1)
        return [make_plan(CASE, "dflop", p) for p in parts]
    return [make_plan(CASE, "megatron", p) for p in space(n, LAYERS, **SPACE)]


def with_ranks(plans, vision, llm):
    return next(
        p
        for p in plans
        if (p.layout.data_ranks("vision"), p.layout.data_ranks("llm")) == (vision, llm)
    )


def vision_s(items, layers, ends):
    """Forward seconds of some layers and a share of the ends, by the profile's formula."""
    return (layers + ends) * (1e-4 + 2e-6 * items * 16 + 1e-8 * items * 16**2)


def llm_s(lengths, layers, ends):
    """Forward seconds of samples in one row; attention costs the square of each length."""
    one = 1e-4 + 2e-6 * sum(lengths)
    return (layers + ends) * one + layers * 1e-8 * sum(n * n for n in lengths)


def whole_s(items, lengths):
    """Seconds of a microbatch's tasks on a rank; the LLM's backward includes its forward."""
    return 3 * vision_s(items, 2, 1) + 3 * llm_s(lengths, 4, 1) + 3 * 1e-4


def in_bins(monkeypatch, bins):
    monkeypatch.setattr(dynamic_shapes, "assign_bins", lambda *_: np.array(bins))


def test_one_device_costs_what_its_microbatches_cost_by_hand(monkeypatch, without_links):
    in_bins(monkeypatch, [0, 1, 1, 0])
    step = simulate_batch(CASE, plans(pytorch, 1)[0], LOADS, 2, "arrival")
    want = whole_s(5, (40, 32)) + whole_s(6, (100, 64))
    assert step.makespan_s == pytest.approx(want)
    assert step.idle_share == pytest.approx(0.0, abs=1e-9)
    names = {b.name for b in step.plan.layout.buckets}
    assert names == {"vision:5x16", "llm:1x72", "vision:6x16", "llm:1x164"}


def test_replicas_wait_for_each_other_only_at_the_end(without_links):
    plan = with_ranks(plans(pytorch, 2), 2, 2)
    step = simulate_batch(CASE, plan, LOADS, 2, "arrival")
    replica_s = [
        sum(whole_s(len(s.lengths("vision")), s.lengths("llm")) for s in LOADS[r::2])
        for r in (0, 1)
    ]
    assert step.makespan_s == pytest.approx(max(replica_s))
    assert step.idle_share == pytest.approx(1 - sum(replica_s) / 2 / max(replica_s))


def untuned(stages, remats, memory_bytes=A100.memory_bytes):
    case = replace(CASE, hardware=replace(A100, memory_bytes=memory_bytes))
    plan, n = published_plan(replace(case, untuned=Untuned(stages, remats)))
    (remat,) = {s.remat for s in plan.layout.segments}
    meshes = plan.layout.submeshes
    assert n == CASE.global_batch // meshes[0].data  # one sample per microbatch
    return len(meshes), meshes[0].model, remat


def test_an_untuned_baseline_is_the_first_stated_one_that_fits():
    assert untuned((2, 4), ("none", "layers")) == (2, 2, "none")
    assert untuned((4, 2), ("layers", "none")) == (4, 1, "layers")
    assert untuned((3, 4), ("named", "layers")) == (4, 1, "layers")  # neither exists
    with pytest.raises(ValueError, match="states no configuration"):
        published_plan(CASE)
    with pytest.raises(ValueError, match="4 devices do not form 3 stages"):
        untuned((3,), ("none",))
    with pytest.raises(ValueError, match="no placement fits") as caught:
        untuned((1,), ("none",), 1.0)
    assert "inf" not in str(caught.value)


def test_published_heads_of_internvit_limit_its_tensor_degrees():
    modules = INTERNVL_72B.model().modules
    degrees = {m: [d for d in range(1, 9) if divides(modules[m], d)] for m in modules}
    assert degrees == {"vision": [1], "llm": [1, 2, 4, 8]}
