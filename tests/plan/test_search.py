"""The search against exhaustive evaluation of its space: every placement, cut and remat alone."""

import dataclasses

import numpy as np
import pytest

import dflop_jax.plan.evaluate as evaluate_module
import dflop_jax.plan.search as search_module
import dflop_jax.plan.space as space_module
from dflop_jax.pipeline.order import in_flight_limit
from dflop_jax.plan.baselines import BASELINES
from dflop_jax.plan.estimate import Rules
from dflop_jax.plan.evaluate import Evaluator, sample_batches
from dflop_jax.plan.load import loads
from dflop_jax.plan.search import search_plan
from dflop_jax.profile.fit import CostModel
from dflop_jax.records import (
    Bucket,
    with_remat,
)
from dflop_jax.schedule.online import schedule_batch
from dflop_jax.schedule.shapes.choose import BucketChoice
from dflop_jax.sim.memory import peak_bytes
from dflop_jax.sim.pipeline import simulate_step
from dflop_jax.sim.predict import bucket_costs

from .cases import (
    BATCH,
    CONFIG,
    SPACES,
    data_profile,
    exhaustive,
    model_profile,
    random_case,
    simple_buckets,
)


@pytest.fixture(autouse=True)
def _quick_buckets(monkeypatch, request):
    if "real_buckets" not in request.fixturenames:
        monkeypatch.setattr(evaluate_module, "choose_buckets", simple_buckets)


@pytest.fixture
def real_buckets():
    """For tests that use the bucket search itself."""


def run(policy="dflop", n_devices=3, profile=None, data=None, effort="quick", **kwargs):
    config = dataclasses.replace(CONFIG, policy=policy, effort=effort)
    return search_plan(
        profile or model_profile(),
        data or data_profile(),
        n_devices=n_devices,
        global_batch=BATCH,
        config=config,
        **kwargs,
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_ranking_is_that_of_exhaustive_evaluation(monkeypatch, seed):
    profile, data, n_devices, hardware, rng = random_case(seed)
    policy = "orch" if n_devices == 1 or seed % 5 == 2 else "dflop"
    config = dataclasses.replace(CONFIG, policy=policy, max_microbatches=int(rng.choice([3, 6])))
    # Every other case gets memory for half of the candidates, so that remat has something to do.
    every = exhaustive(policy, n_devices, profile, data, config, hardware, remat=seed % 4 < 2)
    peaks = sorted(peak for *_, peak in every)
    memory_bytes = peaks[len(peaks) // 2] if seed % 4 < 2 else 0.0
    fit = [e for e in every if not memory_bytes or e[3] <= memory_bytes]

    def search():
        return search_plan(
            profile,
            data,
            n_devices=n_devices,
            global_batch=BATCH,
            config=dataclasses.replace(config, effort="quick"),
            memory_bytes=memory_bytes,
            hardware=hardware,
            shown=5,
        )

    result = search()
    best = {}
    for name, _, took, peak in fit:
        best[name] = min(best.get(name, (np.inf,)), (took, peak))
    ranked = sorted((took, name) for name, (took, _) in best.items())
    got = [(c.makespan_s, c.name) for c in result.candidates]
    assert [t for t, _ in got] == pytest.approx([t for t, _ in ranked[: len(got)]], rel=1e-9)
    assert len(got) == min(5, len(ranked))
    for c in result.candidates:
        took, peak = best[c.name]
        assert (c.makespan_s, c.peak_bytes) == pytest.approx((took, peak), rel=1e-9)
    assert result.n_fit == len({(name, m) for name, m, *_ in fit})
    assert result.plan.predicted["makespan_s"] <= got[0][0] * (1 + 1e-9)

    space = SPACES[policy]

    def shuffled(*args, **kwargs):
        found = list(space(*args, **kwargs))
        return iter([found[i] for i in rng.permutation(len(found))])

    monkeypatch.setitem(space_module.SPACES, policy, shuffled)
    assert search() == result


@pytest.mark.parametrize("frozen", ["vision", "llm"])
def test_frozen_parts_are_not_timed_nor_given_an_optimizer(frozen):
    def trains(s):
        return s.module != frozen

    profile = model_profile(vision=4.0)
    config = dataclasses.replace(CONFIG, policy="dflop")
    every = exhaustive("dflop", 3, profile, data_profile(), config, trains=trains)
    result = run(trains=trains, profile=profile)
    least = min(took for _, _, took, _ in every)
    assert result.candidates[0].makespan_s == pytest.approx(least, rel=1e-9)
    whole = run(profile=profile).plan.predicted
    # A frozen LLM still runs backward, for the encoder below it; a frozen encoder does not.
    got = result.plan.predicted
    assert got["makespan_s"] <= whole["makespan_s"] * (1.0 if frozen == "llm" else 0.8)


@pytest.mark.parametrize("policy", BASELINES)
def test_a_baseline_is_the_best_of_its_space(policy):
    config = dataclasses.replace(CONFIG, policy=policy)
    result = run(policy, 4, shown=100)
    names = {c.name for c in result.candidates}
    limits = {"max_model": config.max_model, "max_stage": config.max_stage}
    space = BASELINES[policy](4, model_profile().n_layers, tied=False, **limits)
    assert names == {p.name for p in space}
    spans = [c.makespan_s for c in result.candidates]
    assert spans == sorted(spans)
    assert len(set(spans)) > 1
    assert result.plan.predicted["makespan_s"] == spans[0]


def test_the_whole_search_is_reproducible(real_buckets):
    assert run(n_devices=2) == run(n_devices=2)


@pytest.mark.parametrize("fits", [True, False])
def test_full_effort_takes_better_buckets_if_they_fit(monkeypatch, fits):
    """Better ones are small ones here; with a huge one they need more memory than allowed."""
    limit = 1.2 * run().candidates[0].peak_bytes
    tried = []

    def choose(shapes, *, effort, **kwargs):
        tried.append(effort)
        (large, *_) = simple_buckets(shapes, **kwargs).buckets
        if effort == "quick":
            return BucketChoice((large,), 0.0, {})
        small = (Bucket(large.tiles, 64), Bucket(large.tiles, 128))
        first = large if fits else Bucket(99, 4096)
        return BucketChoice((first, *small), 0.0, {})

    monkeypatch.setattr(evaluate_module, "choose_buckets", choose)
    quick = run(memory_bytes=limit)
    assert tried == ["quick"]
    full = run(effort="full", memory_bytes=limit)
    assert tried[1:].count("full") == 1
    assert tried[1:].count("quick") >= 2
    assert full.candidates == quick.candidates
    best = full.plan.predicted["makespan_s"]
    assert best <= quick.plan.predicted["makespan_s"]
    assert (len(full.plan.buckets) == 3) == fits
    assert max(v for k, v in full.plan.predicted.items() if "peak" in k) <= limit


def keeps_little():
    """A profile whose layers keep a twentieth of what they compute with."""
    whole = model_profile()
    timings = [dataclasses.replace(t, hidden_bytes=t.hidden_bytes / 20) for t in whole.timings]
    params = {"vision": 100, "llm": 100}
    return dataclasses.replace(
        whole, timings=tuple(timings), layer_param_bytes=params, ends_param_bytes=params
    )


def test_remat_where_memory_needs_it_and_only_there():
    free = run(profile=keeps_little(), shown=100)
    assert {c.remat for c in free.candidates} == {"none"}
    limit = 0.6 * free.candidates[0].peak_bytes
    tight = run(profile=keeps_little(), memory_bytes=limit, shown=100)
    assert "llm layers" in {c.remat for c in tight.candidates}
    assert all(c.peak_bytes <= limit for c in tight.candidates)
    forced = run(profile=keeps_little(), remat="layers", shown=100)
    assert {c.remat for c in forced.candidates} == {"vision layers, llm layers"}
    assert {s.remat for s in forced.plan.segments} == {"layers"}
    assert forced.candidates[0].makespan_s > free.candidates[0].makespan_s


def test_remat_is_dropped_where_chosen_buckets_do_not_need_it(monkeypatch):
    plan = with_remat(run(profile=keeps_little()).plan, "layers")
    small, large = (dataclasses.replace(plan, buckets=(Bucket(9, t),)) for t in (96, 9600))

    def kept(plan, memory_bytes, remat="auto"):
        held = loads(plan.modules, data_profile().shapes, [], BATCH)
        rules = Rules(CostModel(keeps_little()), held, 32, 8, lambda s: True, memory_bytes, remat)
        evaluator = Evaluator(rules, data_profile().shapes, [], CONFIG, BATCH)
        found = search_module._keeping_more(evaluator, plan)
        return {s.module: s.remat for s in found.segments}

    costs = CostModel(keeps_little())
    limit = max(peak_bytes(large, costs, in_flight_limit(large)).values())
    assert kept(small, limit) == {"vision": "none", "llm": "none"}
    assert kept(small, limit, "layers") == {"vision": "layers", "llm": "layers"}
    assert kept(large, limit)["llm"] == "layers"
    assert kept(large, 0.0) == {"vision": "none", "llm": "none"}


@pytest.mark.parametrize("policy", ["dflop", "blind"])
def test_predictions_are_the_simulated_mean_of_the_sampled_batches(policy):
    plan, profile = run(policy).plan, model_profile()
    trainable = [s.name for s in plan.segments]
    seconds = CostModel(profile).task_seconds(plan)
    prices = bucket_costs(plan, seconds, trainable)
    traces = []
    for i, batch in enumerate(sample_batches(data_profile().shapes, BATCH, 2)):
        groups = schedule_batch(batch, plan, prices, step=i).groups
        buckets = [g[0].bucket for g in groups]
        traces.append(simulate_step(plan, buckets, seconds, trainable, concurrency=8.0))
    makespan_s = np.mean([t.makespan_s for t in traces])
    assert plan.predicted["makespan_s"] == pytest.approx(makespan_s)
    for m in plan.submeshes:
        busy = np.mean([t.busy_fraction()[m.name] for t in traces])
        assert plan.predicted[f"busy_fraction.{m.name}"] == pytest.approx(busy)
    peak = peak_bytes(plan, CostModel(profile), in_flight_limit(plan))
    for name, value in peak.items():
        assert plan.predicted[f"peak_bytes.{name}"] == pytest.approx(value)


def test_buckets_hold_every_sample_and_are_as_many_as_allowed():
    for policy in ("dflop", "blind"):
        plan = run(policy).plan
        assert 1 <= len(plan.buckets) <= CONFIG.buckets
        assert all(b.tokens % 32 == 0 for b in plan.buckets)
        for s in data_profile().shapes:
            assert any(
                b.tiles * plan.data_ranks("vision") >= s.tiles and b.tokens >= s.llm_tokens
                for b in plan.buckets
            )


def test_a_heavier_encoder_gets_more_devices():
    def devices(weight):
        plan = run(n_devices=4, profile=model_profile(vision=weight)).plan
        return plan.submesh("vision").n_devices

    assert devices(0.01) < devices(30.0) == 3


def test_memory_is_respected():
    free = run(shown=100)
    peaks = sorted({c.peak_bytes for c in free.candidates})
    limit = peaks[len(peaks) // 2]
    tight = run(memory_bytes=limit)
    held = [v for k, v in tight.plan.predicted.items() if k.startswith("peak_bytes.")]
    assert max(held) <= limit
    assert tight.plan.predicted["makespan_s"] >= free.plan.predicted["makespan_s"]
    assert tight.n_fit < tight.n_candidates == free.n_fit
    # Just below the smallest of all, nothing is left.
    with pytest.raises(ValueError, match=r"no plan fits into .* GiB more; .* need less"):
        run(memory_bytes=1.0)


def test_the_least_memory_is_what_the_error_says():
    scaled = dataclasses.replace(model_profile(), layer_param_bytes={"vision": 2**28, "llm": 2**28})
    with pytest.raises(ValueError, match="the smallest needs") as failed:
        run(profile=scaled, memory_bytes=2.0**20)
    said = float(str(failed.value).split("needs ")[-1].split(" GiB")[0]) + 2**-10
    run(profile=scaled, memory_bytes=(said + 0.01) * 2**30)
    with pytest.raises(ValueError, match="no plan fits"):
        run(profile=scaled, memory_bytes=(said - 0.01) * 2**30)


def test_one_device():
    with pytest.raises(ValueError, match=r"dflop has no placement on 1 devices.*plan.policy auto"):
        run("dflop", 1)
    plan = run("blind", 1).plan
    assert plan.n_devices == 1
    assert plan.grouping == "arrival"
    assert {s.module for s in plan.segments} == {"vision", "llm"}


@pytest.mark.parametrize("policy", ["dflop", "blind"])
def test_a_model_without_encoder(policy):
    profile = model_profile(modules=1)
    plan = run(policy, 2, profile=profile, data=data_profile(tiles=False)).plan
    assert plan.modules == ("llm",)
    assert plan.n_devices == 2


def test_unmeasured_degrees_are_left_out():
    plan = run(n_devices=4, profile=model_profile(degrees=(1,)))
    assert all("x2@" not in c.name for c in plan.candidates)


def test_a_tied_head_keeps_the_llm_in_one_segment():
    for c in run(n_devices=4, tied=True).candidates:
        assert "*" not in c.name


def test_sampled_batches():
    shapes = data_profile().shapes
    batches = sample_batches(shapes, 8, 3)
    assert batches == sample_batches(shapes, 8, 3)
    assert [len(b) for b in batches] == [8, 8, 8]
    assert batches[0] != batches[1]
    whole = sample_batches(shapes, len(shapes), 1)[0]
    assert sorted(map(repr, whole)) == sorted(map(repr, shapes))  # drawn without repeats
    assert len(sample_batches(shapes[:2], 5, 1)[0]) == 5


def test_auto_takes_the_better_of_its_policies():
    for weights in ((1.0, 1.0), (0.05, 8.0)):
        profile = model_profile(*weights)
        spans = {
            policy: run(policy, 4, profile=profile).plan.predicted["makespan_s"]
            for policy in ("dflop", "orch", "auto")
        }
        chosen = run("auto", 4, profile=profile).plan
        assert spans["auto"] == min(spans["dflop"], spans["orch"])
        assert chosen.policy == min(("dflop", "orch"), key=spans.get)


def test_submeshes_that_devices_cannot_form_are_left_out():
    every = run("dflop", 4, shown=100).candidates
    some = run("dflop", 4, allowed=lambda m: m.n_devices == 2, shown=100).candidates
    assert {c.name for c in some} == {c.name for c in every if "@2" in c.name and "*" not in c.name}
    with pytest.raises(ValueError, match="the devices at hand cannot form"):
        run("dflop", 4, allowed=lambda m: False)
