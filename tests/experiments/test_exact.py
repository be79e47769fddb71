"""Steps at exact shapes: costs by hand, dealing, and the search against trying everything."""

from dataclasses import replace

import numpy as np
import pytest

from dflop_jax.hardware import find_hardware
from dflop_jax.plan.baselines import megatron, pytorch
from dflop_jax.plan.placement import lay_out
from dflop_jax.plan.space import separate as families
from dflop_jax.profile.collectives import all_gather_s, reduce_scatter_s
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.records import BACKWARD, FORWARD, Load
from experiments.paper.dealing import bins_of, dealt_quickly, rates_of, run_step
from experiments.paper.exact import (
    ExactCosts,
    content_of,
    is_replicated,
    peak_bytes,
    ranks_of,
    run_bins,
    segment_seconds,
)
from experiments.paper.tune import Search, largest_amounts, replica_bounds, tune, with_remat
from tests.plan.cases import TILE, model_profile, outlines, recompute

LAYERS = {"vision": 2, "llm": 4}
SPACE = {"max_model": 2, "max_stage": 4}
A100 = find_hardware("a100-80")


def load(tiles, tokens):
    return Load({"vision": (TILE,) * tiles, "llm": (tokens,)})


LOADS = [load(3, 40), load(1, 100), load(5, 64), load(2, 32)]


def profile():
    """The cases' profile, but the LLM's attention costs the squares of a row's samples."""
    whole = model_profile()
    timings = [
        replace(
            t,
            layer_forward_s=f,
            layer_backward_s=2 * f,
            ends_forward_s=f,
            ends_backward_s=2 * f,
            pair_forward_s=1e-8 / t.model**0.7,
            pair_backward_s=2e-8 / t.model**0.7,
            recompute=recompute(f, f, 100.0 * t.shape.size / t.model, 0.25, 1e-8 / t.model**0.7),
        )
        if t.module == "llm"
        else t
        for t in whole.timings
        for f in [(1e-4 + 2e-6 * t.shape.size) / t.model**0.7]
    ]
    return replace(whole, timings=tuple(timings))


def costs(hardware=None):
    return ExactCosts(CostModel(profile()), hardware)


def separate(n, layers, **space):
    """Laid out, and without pipelines inside a program."""
    return [lay_out(o, layers) for o in outlines(families, n, layers, **space) if o.group_size == 1]


def batch(n, seed=0):
    rng = np.random.default_rng(seed)
    return [load(t, k) for t, k in rng.integers((1, 20), (12, 200), (n, 2)).tolist()]


def vision_s(items, layers, ends):
    """Forward of `layers` layers and a share of the ends, from the profile's own formula."""
    return (layers + ends) * (1e-4 + 2e-6 * items * 16 + 1e-8 * items * 16**2)


def llm_s(lengths, layers, ends):
    """The same for samples of these lengths in one row: attention costs each one's square."""
    one = 1e-4 + 2e-6 * sum(lengths)
    return (layers + ends) * one + layers * 1e-8 * sum(n * n for n in lengths)


def test_one_device_costs_what_its_microbatches_cost_by_hand():
    (placement,) = pytorch(1, LAYERS, **SPACE)
    bins = np.array([0, 1, 1, 0])
    step = run_bins(costs(), placement, LOADS, bins, 2)
    want = 0.0
    for items, lengths in ((5, (40, 32)), (6, (100, 64))):
        want += 3 * vision_s(items, 2, 1) + 3 * llm_s(lengths, 4, 1)  # a gradient takes two
        want += 3 * 1e-4  # calls: the LLM's forward is part of its backward
    assert step.makespan_s == pytest.approx(want)
    assert step.idle_share == pytest.approx(0.0, abs=1e-9)
    assert [b.name for b in step.plan.buckets] == ["vision:5x16 llm:1x72", "vision:6x16 llm:1x164"]


def test_replicas_wait_for_each_other_only_at_the_end():
    placement = next(p for p in pytorch(2, LAYERS, **SPACE) if ranks_of(p)["llm"] == 2)
    bins = np.array([0, 1, 2, 3])  # microbatch * 2 + rank
    step = run_bins(costs(), placement, LOADS, bins, 2)
    each = [
        sum(
            3 * vision_s(len(s.lengths("vision")), 2, 1) + 3 * llm_s(s.lengths("llm"), 4, 1) + 3e-4
            for s in LOADS[r::2]
        )
        for r in (0, 1)
    ]
    assert step.makespan_s == pytest.approx(max(each))
    assert step.idle_share == pytest.approx(1 - sum(each) / 2 / max(each))


def test_unequal_ranks_wait_for_each_other_at_every_microbatch():
    placement = next(
        p for p in separate(3, LAYERS, **SPACE) if ranks_of(p) == {"vision": 1, "llm": 2}
    )
    assert not is_replicated(placement)
    content = content_of(costs(), placement, LOADS, np.array([0, 1, 2, 3]), 2)
    times = segment_seconds(costs(), placement, content)
    assert times["vision", FORWARD] == pytest.approx(
        np.array([[vision_s(4, 2, 1) + 1e-4, vision_s(7, 2, 1) + 1e-4]])
    )
    slowest = [max(llm_s([a], 4, 1), llm_s([b], 4, 1)) for a, b in ((40, 100), (64, 32))]
    assert times["llm", BACKWARD] == pytest.approx(np.array([[3 * x + 1e-4 for x in slowest]]))
    # a rank that waits for the slower one is not busy
    step = run_bins(costs(), placement, LOADS, np.array([0, 1, 2, 3]), 2)
    own = [3 * llm_s(s.lengths("llm"), 4, 1) + 1e-4 for s in LOADS]
    vision = sum(3 * vision_s(n, 2, 1) + 2e-4 for n in (4, 7))
    assert step.busy_s == pytest.approx({"vision": vision, "llm": sum(own) / 2})
    assert step.idle_share == pytest.approx(1 - (vision + sum(own)) / 3 / step.makespan_s)


def test_two_stages_overlap_two_microbatches():
    placement = next(iter(separate(2, LAYERS, **SPACE)))
    bins = np.array([0, 0, 1, 1])
    step = run_bins(costs(), placement, LOADS, bins, 2)
    v = [vision_s(n, 2, 1) for n in (4, 7)]
    l = [3 * llm_s(x, 4, 1) + 1e-4 for x in ((40, 100), (64, 32))]
    forward = [x + 1e-4 for x in v]
    backward = [2 * x + 1e-4 for x in v]
    first = forward[0] + l[0]  # the LLM is through with the first
    second = max(first, forward[0] + forward[1]) + l[1]
    after = max(first, forward[0] + forward[1]) + backward[0]
    assert step.makespan_s == pytest.approx(max(after, second) + backward[1])


def test_the_end_of_a_step_adds_up_gradients_over_data_ranks():
    placement = next(p for p in pytorch(2, LAYERS, **SPACE) if ranks_of(p)["llm"] == 2)
    bins = np.array([0, 1, 0, 1])
    parts = [10_000 * 2 + 5_000, 10_000 * 4 + 5_000]
    want = sum(
        reduce_scatter_s(n, 2, A100) + all_gather_s(n, 2, A100)
        + 7 * n / 2 / A100.memory_bandwidth for n in parts
    )  # fmt: skip
    steps = [run_bins(costs(h), placement, LOADS, bins, 1).makespan_s for h in (A100, None)]
    assert steps[0] - steps[1] == pytest.approx(want)


@pytest.mark.parametrize("n", [1, 2, 7, 16])
@pytest.mark.parametrize("grouping", ["arrival", "balanced"])
def test_every_sample_has_a_bin(n, grouping):
    placement = next(p for p in pytorch(1, LAYERS, **SPACE))
    bins = bins_of(costs(), placement, batch(n), n, grouping)
    assert sorted(set(bins.tolist())) == list(range(n))
    assert len(bins) == n


def test_balanced_bins_are_no_worse_than_those_of_arrival():
    placement = next(iter(separate(4, LAYERS, **SPACE)))
    found = [run_step(costs(), placement, batch(16), 4, g) for g in ("arrival", "balanced")]
    assert found[1].makespan_s < found[0].makespan_s


def test_bad_numbers_of_microbatches_and_groupings():
    placement = next(pytorch(1, LAYERS, **SPACE))
    for m in (0, 5):
        with pytest.raises(ValueError, match="use fewer microbatches or a larger global batch"):
            run_step(costs(), placement, LOADS, m, "arrival")
    with pytest.raises(ValueError, match="not arrival or balanced"):
        run_step(costs(), placement, LOADS, 1, "sorted")


def quick_bins(c, placement, samples, m, grouping):
    """As the search deals them."""
    if grouping == "arrival":
        return bins_of(c, placement, samples, m, grouping)
    ranks = ranks_of(placement)["llm"]
    return dealt_quickly(c, rates_of(c, placement), samples, m * ranks, ranks)


def every(n):
    found = [*pytorch(n, LAYERS, **SPACE), *megatron(n, LAYERS, **SPACE)]
    return found + separate(n, LAYERS, **SPACE)


@pytest.mark.parametrize("grouping", ["arrival", "balanced"])
def test_bounds_hold_and_the_slowest_replicas_are_those_simulated(grouping):
    c, one = costs(A100), batch(8)
    search = Search([one], c, grouping)
    for p in every(4)[::3]:
        for m in (1, 3):
            if m * ranks_of(p)["llm"] > len(one):
                continue
            bins = quick_bins(c, p, one, m, grouping)
            real = run_bins(c, p, one, bins, m).makespan_s
            assert search.makespan_s(p, m) == pytest.approx(real, rel=0.02)
            bounds = replica_bounds(c, p, segment_seconds(c, p, search.dealt(p, m, 0)))
            assert search.bound_s(p, m) == pytest.approx(bounds.max())
            assert search.floor_s(p, m) <= bounds.max() * (1 + 1e-9)
            assert bounds.max() <= real * (1 + 1e-9)


@pytest.mark.parametrize("grouping", ["arrival", "balanced"])
def test_tuning_finds_what_trying_everything_finds(grouping):
    c, both = costs(A100), [batch(6, 1), batch(6, 2)]
    space = every(4)[::4]
    found = tune(space, both, c, remats=("none",), grouping=grouping)
    tried = {}
    for p in space:
        most = 6 // ranks_of(p)["llm"]
        for m in {1, 2, 4, most} & set(range(1, most + 1)):
            bins = [quick_bins(c, p, b, m, grouping) for b in both]
            steps = [run_bins(c, p, b, x, m) for b, x in zip(both, bins, strict=True)]
            tried[id(p), m] = np.mean([s.makespan_s for s in steps])
    assert found.makespan_s == pytest.approx(min(tried.values()), rel=0.02)
    assert found.tried == len(tried)
    assert found.simulated < found.tried
    backwards = tune(space[::-1], both, c, remats=("none",), grouping=grouping)
    assert backwards.makespan_s == pytest.approx(found.makespan_s)


def test_memory_rules_placements_out_and_layers_are_recomputed_for_it():
    heavy = tuple(
        replace(t, recompute={r: replace(c, layer_bytes=50 * c.layer_bytes)
                              for r, c in t.recompute.items()})
        for t in profile().timings
    )  # fmt: skip
    c, one = ExactCosts(CostModel(replace(profile(), timings=heavy))), [batch(8)]
    space = list(megatron(4, LAYERS, **SPACE))
    args = {"grouping": "arrival", "max_microbatches": 2}

    def least_bytes(remat):
        found = []
        for p in (with_remat(p, remat) for p in space):
            for m in (1, 2):
                content = content_of(c, p, one[0], bins_of(c, p, one[0], m, "arrival"), m)
                found.append(peak_bytes(c, p, largest_amounts([content])))
        return min(found)

    free = tune(space, one, c, **args)
    assert {s.remat for s in free.placement.segments} == {"none"}
    assert free.n_microbatches <= 2
    tight = tune(space, one, c, memory_bytes=least_bytes("none"), remats=("none",), **args)
    assert tight.peak_bytes == pytest.approx(least_bytes("none"))
    assert tight.makespan_s >= free.makespan_s
    below = 0.999 * least_bytes("none")
    with pytest.raises(ValueError, match="the least needs"):
        tune(space, one, c, memory_bytes=below, remats=("none",), **args)
    again = tune(space, one, c, memory_bytes=below, **args)
    assert {s.remat for s in again.placement.segments} == {"layers"}
    assert least_bytes("layers") <= again.peak_bytes <= below
