"""The search against exhaustive evaluation of its own space, one placement at a time."""

import dataclasses
import functools

import numpy as np
import pytest

import dflop_jax.plan.evaluate as evaluate_module
import dflop_jax.plan.search as search_module
from dflop_jax.config import PlanConfig
from dflop_jax.pipeline.order import in_flight_limit
from dflop_jax.plan.evaluate import sample_batches
from dflop_jax.plan.placement import separate, shared, uniform
from dflop_jax.plan.search import search_plan
from dflop_jax.profile.fit import CostModel
from dflop_jax.records import (
    Bucket,
    DataProfile,
    LayerTiming,
    ModelProfile,
    ModuleShape,
    SampleShape,
)
from dflop_jax.schedule.buckets import BucketChoice
from dflop_jax.schedule.online import schedule_batch
from dflop_jax.sim.pipeline import simulate_step
from dflop_jax.sim.predict import bucket_costs

BATCH = 8
CONFIG = PlanConfig(
    buckets=2, max_model=2, max_stage=2, max_microbatches=8, sampled_batches=2, devices=0
)


def model_profile(vision=1.0, llm=1.0, *, degrees=(1, 2), concurrency=8.0, modules=2):
    """Times from a formula; `vision` and `llm` weigh the modules, tensor parallelism is 80 %."""
    timings = []
    for module, weight, shapes in (
        ("vision", vision, [(1, 16), (4, 16), (16, 16)]),
        ("llm", llm, [(1, 32), (1, 128), (4, 64)]),
    )[2 - modules :]:
        for tp in degrees:
            for items, tokens in shapes:
                f = weight * (1e-4 + 2e-6 * items * tokens + 1e-8 * items * tokens**2)
                f /= tp**0.7
                temp = 100.0 * items * tokens / tp
                shape = ModuleShape(items, tokens)
                timings.append(LayerTiming(module, tp, shape, f, 3 * f, f, 3 * f, temp, temp, temp))
    names = ("vision", "llm")[2 - modules :]
    return ModelProfile(
        key="k",
        device="cpu",
        timings=tuple(timings),
        layer_param_bytes=dict.fromkeys(names, 10_000),
        ends_param_bytes=dict.fromkeys(names, 5_000),
        n_layers={"vision": 2, "llm": 4} if modules == 2 else {"llm": 4},
        entry_share=dict.fromkeys(names, 0.3),
        item_tokens={"vision": 16},
        concurrency=concurrency,
        task_overhead_s=1e-4,
    )


@functools.cache
def data_profile(tiles=True):
    rng = np.random.default_rng(0)
    counts = np.minimum(rng.pareto(1.2, 60) * 2, 9).astype(int) * tiles
    shapes = [SampleShape(int(t), 20, int(4 * t + rng.integers(10, 60))) for t in counts]
    return DataProfile("made up", 60, tuple(shapes))


def simple_buckets(
    shapes, *, global_batch, vision_ranks, llm_ranks, token_multiple, max_microbatches, **_
):
    """A rule in place of the bucket search, which has tests of its own and takes seconds: what
    the largest sample or an even share of the batch needs, and a bucket without tiles."""

    def capacity(load, ranks, multiple):
        share = global_batch * np.mean(load) / max_microbatches
        need = max(max(load), 1.3 * share) / max(ranks, 1)
        return int(-(-need // multiple) * multiple)

    tiles = capacity([s.tiles for s in shapes], vision_ranks, 1)
    longest = max(s.llm_tokens for s in shapes)
    tokens = capacity([s.llm_tokens for s in shapes], llm_ranks, token_multiple)
    tokens = max(tokens, -(-longest // token_multiple) * token_multiple)
    both = (Bucket(tiles, tokens), Bucket(0, tokens))
    return BucketChoice(both[: 1 + (tiles > 0)], 0.0, {})


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


def one_at_a_time(monkeypatch, policy, n_devices, **kwargs):
    """{placement name: makespan}: each placement searched alone, so that nothing is left out."""
    space = {"dflop": separate, "orch": shared, "blind": uniform}[policy]
    profile = kwargs.get("profile") or model_profile()
    limits = {"max_model": CONFIG.max_model, "max_stage": CONFIG.max_stage}
    found = {}
    for placement in space(n_devices, profile.n_layers, tied=False, **limits):
        with monkeypatch.context() as patch:
            patch.setattr(search_module, space.__name__, lambda *_, p=placement, **__: iter([p]))
            result = run(policy, n_devices, **kwargs)
        found[placement.name] = result.plan.predicted["makespan_s"]
    return found


@pytest.mark.parametrize(
    "policy, weights, concurrency",
    [
        ("dflop", (1.0, 1.0), 8.0),
        ("dflop", (8.0, 1.0), 8.0),
        ("dflop", (1.0, 4.0), 1.5),
        ("orch", (1.0, 1.0), 8.0),
        ("orch", (1.0, 4.0), 2.0),
        ("blind", (1.0, 1.0), 8.0),
        ("blind", (3.0, 1.0), 1.0),
    ],
)
def test_the_chosen_plan_is_the_best_of_all(monkeypatch, policy, weights, concurrency):
    profile = model_profile(*weights, concurrency=concurrency)
    every = one_at_a_time(monkeypatch, policy, 4, profile=profile)
    result = run(policy, 4, profile=profile)
    assert result.plan.predicted["makespan_s"] == min(every.values())
    evaluated = [c for c in result.candidates if c.makespan_s is not None]
    assert {c.name.split(" m<=")[0] for c in result.candidates} == set(every)
    assert evaluated[0].makespan_s == min(every.values())
    assert len({round(v, 12) for v in every.values()}) > 1  # there was something to choose
    for c in evaluated:
        assert c.lower_bound_s <= c.makespan_s
        assert c.makespan_s >= every[c.name.split(" m<=")[0]]
    for c in result.candidates:  # leaving out is sound
        if c.makespan_s is None:
            assert every[c.name.split(" m<=")[0]] >= min(every.values())


@pytest.mark.parametrize("frozen", ["vision", "llm"])
def test_the_lower_bound_holds_when_parts_are_frozen(frozen):
    profile = model_profile(vision=4.0)
    result = run(trains=lambda s: s.module != frozen, profile=profile)
    for c in result.candidates:
        assert c.makespan_s is None or c.lower_bound_s <= c.makespan_s
    whole = run(profile=profile).plan.predicted["makespan_s"]
    # A frozen LLM still runs backward, for the encoder below it; a frozen encoder does not.
    assert result.plan.predicted["makespan_s"] <= whole * (1.0 if frozen == "llm" else 0.8)


@pytest.mark.parametrize("policy", ["dflop", "blind"])
def test_the_order_of_the_space_does_not_matter(monkeypatch, policy):
    space = {"dflop": separate, "orch": shared, "blind": uniform}[policy]
    want = run(policy)
    for seed in (0, 1):
        rng = np.random.default_rng(seed)

        def shuffled(*args, rng=rng, **kwargs):
            found = list(space(*args, **kwargs))
            return iter([found[i] for i in rng.permutation(len(found))])

        monkeypatch.setattr(search_module, space.__name__, shuffled)
        assert run(policy) == want


def test_the_whole_search_is_reproducible(real_buckets):
    result = run(n_devices=2)
    assert result == run(n_devices=2)
    assert all(c.lower_bound_s <= c.makespan_s for c in result.candidates if c.makespan_s)


@pytest.mark.parametrize("fits", [True, False])
def test_full_effort_takes_better_buckets_if_they_fit(monkeypatch, fits):
    """Better ones are small ones here; with a huge one they need more memory than allowed."""
    limit = max(c.peak_bytes for c in run().candidates)
    quick = run(memory_bytes=limit)

    def choose(shapes, *, effort, **kwargs):
        choice = simple_buckets(shapes, **kwargs)
        if effort == "quick":
            return choice
        (large, *_) = choice.buckets
        small = (Bucket(large.tiles, 64), Bucket(large.tiles, 128))
        return dataclasses.replace(choice, buckets=(large if fits else Bucket(99, 4096), *small))

    monkeypatch.setattr(evaluate_module, "choose_buckets", choose)
    full = run(effort="full", memory_bytes=limit)
    if fits:
        assert full.plan.predicted["makespan_s"] < quick.plan.predicted["makespan_s"]
    else:
        assert full.plan == quick.plan
    assert full.candidates == quick.candidates


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
    peak = CostModel(profile).peak_bytes(plan, in_flight_limit(plan))
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
    free = run()
    peaks = sorted({c.peak_bytes for c in free.candidates if c.peak_bytes})
    limit = peaks[len(peaks) // 2]
    tight = run(memory_bytes=limit)
    held = [v for k, v in tight.plan.predicted.items() if k.startswith("peak_bytes.")]
    assert max(held) <= limit
    assert tight.plan.predicted["makespan_s"] >= free.plan.predicted["makespan_s"]
    assert any("GiB more" in c.why for c in tight.candidates)
    # Just below the smallest of all, nothing is left.
    with pytest.raises(ValueError, match=r"no plan fits into .* GiB more; use more"):
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
    every = run("dflop", 4).candidates
    some = run("dflop", 4, allowed=lambda m: m.n_devices == 2).candidates
    assert {c.name for c in some} == {c.name for c in every if "@2" in c.name and "*" not in c.name}
    with pytest.raises(ValueError, match="has no placement on 4 devices"):
        run("dflop", 4, allowed=lambda m: False)
